"""What ``gradwire bench gpu`` does, as far as it can be seen without a GPU."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from gradwire import cli, kernels
from gradwire.kernels import codes
from gradwire_bench import (
    gpu,
    gpu_docs,
    gpu_operations,
    gpu_part,
    gpu_picture,
    gpu_report,
    gpu_steps,
    models,
    origin,
    shapes,
)
from gradwire_bench.cell import Cell, Record
from gradwire_bench.suite import ledger, plan, tables

CPU = torch.device("cpu")
without_a_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")


@pytest.mark.parametrize(("model", "numel"), [(models.ResNet50, 25_557_032), (models.GPT2, 124_439_808)])
def test_models_are_the_known_ones(model: type[nn.Module], numel: int) -> None:
    with torch.device("meta"):
        built = model()
    assert sum(parameter.numel() for parameter in built.parameters()) == numel
    if model is models.ResNet50:
        own = sorted(tuple(parameter.shape) for parameter in built.parameters())
        assert own == sorted(shape for _, shape in shapes.get("resnet50"))


@pytest.mark.parametrize("name", gpu_steps.TASKS)
def test_models_have_a_loss(name: str) -> None:
    task = gpu_steps.TASKS[name]
    with torch.device("meta"):
        built, batch = task.make(), task.batch_of(2, torch.device("meta"))
    assert built(*batch).shape == ()


@without_a_gpu
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gradwire", "bench", "gpu"])
    assert cli.main() == 2
    assert "sees no GPU here" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert gpu.main() == 2


def test_it_needs_neither_rich_nor_cyclopts_nor_what_draws() -> None:
    missing = ("rich", "cyclopts", "matplotlib", "scipy", "sklearn", "jinja2", "triton")
    command = (
        f"import sys; sys.modules.update(dict.fromkeys({missing})); "
        "from gradwire_bench import gpu, gpu_part, gpu_ranks; from gradwire_bench.suite import ledger"
    )
    subprocess.run([sys.executable, "-c", command], check=True)


FEW = {name: gpu_operations.FAMILIES[name] for name in ("sign", "memories", "sparse", "integer sums", "low rank")}
"""Of codes one is enough: all of them are run by their bits' test in Triton's interpreter."""


@pytest.mark.usefixtures("begun_quickly")
@pytest.mark.parametrize("part", [part for part in gpu.PARTS if part not in ("kernels:1000000", "kernels:125000000")])
def test_every_part_runs(part: str) -> None:
    found = {}
    with mock.patch.object(gpu_part, "seconds", once), mock.patch.object(gpu_part, "FAMILIES", FEW):
        for subject, find in gpu_part.subjects(part, CPU):
            assert subject not in found
            found[subject] = find()
    assert len(found) >= (1 if part == "ranks" else 4)
    for subject, result in found.items():
        if part.partition(":")[0] in ("bits", "methods", "waits", "memory", "ranks"):
            assert result["reached"], (subject, result)
        elif part.startswith("kernels"):
            assert result["of_copy"] > 0, subject
        elif part.startswith("step"):
            assert result["milliseconds"] > 0, subject
        else:
            assert gpu_steps.length(result["streams"][max(result["streams"])]) > 0
    held = {result.get("group", "") for result in found.values() if "reached" in result}
    assert set(gpu_report.claims(part)) <= held


def once(run: Any, *others: object) -> float:
    run()
    return 1e-3


def test_of_every_code_and_kernel_there_are_bits() -> None:
    assert {type(code) for code, _ in gpu_operations.CODES.values()} == set(codes.ALL) - {codes.Integers}
    assert set(gpu_operations.CODES) > gpu_operations.TIMED


def test_a_wrong_bit_is_found() -> None:
    def spoiling(code: object, block: object, source: object, payload: torch.Tensor, key: int) -> None:
        encode(code, block, source, payload, key)
        if next(calls) % 2 == 0:
            payload[-5] ^= 1

    encode, calls = kernels.encode, iter(range(1000))
    finds = dict(gpu_part.bits(500, CPU))
    with mock.patch.object(kernels, "encode", spoiling):
        result = finds["sign"]()
    assert not result["reached"]
    assert "sign: encode, layers, normal" in result["found"]


def test_spans() -> None:
    spans = gpu_steps.merged([(2.0, 3.0), (0.0, 1.0), (1.001, 1.5), (2.5, 2.7)])
    assert spans == [(0.0, 1.5), (2.0, 3.0)]
    assert gpu_steps.length(gpu_steps.common(spans, [(1.0, 2.5)])) == 1.0


PART = """
import json, os, sys, time
job = json.loads(sys.argv[1])
part, skipped = job["part"], job["skipped"]
def emit(event, **fields): print(json.dumps({"event": event, **fields}), flush=True)
emit("machine", facts={"gpu": "none"})
print("a library says something")
if part == "dies": sys.exit("no device")
for subject in ("first", "crashes", "hangs", "fails", "last"):
    if subject in skipped: continue
    emit("begun", subject=subject)
    if subject == "crashes": os.abort()
    if subject == "hangs": time.sleep(60)
    error = "RuntimeError: an illegal memory access" if subject == "fails" else None
    emit("done", subject=subject, result={} if error else {"reached": True}, seconds=0.1, error=error)
    if error: sys.exit(3)
"""


def test_what_crashes_or_hangs_loses_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_part.py").write_text(PART)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    told: list[str] = []
    kept: list[Record] = []
    with (
        mock.patch.object(gpu, "WORKER", "a_part"),
        mock.patch.object(gpu, "SILENCE", 5.0),
        mock.patch.object(gpu, "PARTS", {"memory": 30.0, "dies": 30.0}),
    ):
        gpu.measure("cpu", told.append, kept.append, ("memory", "dies"))
    assert told == [f"memory  {subject}" for subject in ("first", "crashes", "hangs", "fails", "last")]
    outcomes = {each.cell.method: each.error for each in kept}
    assert outcomes["first"] is outcomes["last"] is None
    assert "was killed by SIGABRT" in (outcomes["crashes"] or "")
    assert "said nothing for 5 s" in (outcomes["hangs"] or "")
    assert "illegal memory access" in (outcomes["fails"] or "")
    assert "no device" in (outcomes["the rest"] or "")
    assert {each.machine["gpu"] for each in kept[:-1]} == {"none"}
    with mock.patch.object(gpu, "SECONDS", -1.0):
        gpu.measure("cpu", told.append, kept.append, ("waits",))
    assert kept[-1].error == "no time was left for it"


def record(part: str, subject: str, error: str | None = None, **result: Any) -> Record:
    made = Record.now(Cell("gpu", part, subject, workers=1, steps=0, device="cuda"), result, 1.0, "command", error)
    return replace(made, machine={**made.machine, "gpu": "a GPU", "by_reference": ["merge_top"]})


SPEED = {"group": "quantisers", "microseconds": 100.0, "bytes_per_value": 20.1, "copy_gbps": 4e3, "target": 0.75}
STEP = {"milliseconds": 50.5, "dense_milliseconds": 50.0, "overhead": 0.01, "target": 0.01, "reached": True}
RECORDS = [
    record("kernels:25000000", "sign: encode", of_copy=0.8, reached=True, **SPEED),
    record("kernels:25000000", "sign: decode 8", of_copy=0.7, reached=False, **SPEED),
    record("kernels:25000000", "dynamic: encode", "RuntimeError: an illegal memory access"),
    record("step:ResNet-50", "acpsgd", **STEP),
    record("step:ResNet-50", "topk", **(STEP | {"overhead": 0.4, "reached": False})),
    record("overlap:ResNet-50", "topk", streams={"7": [(0.0, 2.0)], "20": [(1.0, 3.0)]}, ours=2.0, beside=0.5),
    record("ranks", "NCCL", reached=False, found="refused"),
    record("ranks", "gloo", reached=True, found=""),
]


def test_the_verdicts_come_first() -> None:
    said = list(gpu_report.lines(RECORDS))
    assert said[0].startswith(
        "MISSED   quantisers, 25 M values: at least 75% of a copy's bandwidth: 1 of 2; not: sign: d"
    )
    assert said[0].endswith("could not be measured: dynamic: encode")
    assert said[1].startswith("unknown  top-k")
    assert said[5] == "MISSED   ResNet-50, a step at world size 1: at most 1% over DDP's: 1 of 2; not: topk"
    assert said[6].startswith("reached  two ranks on one GPU")
    assert any("an illegal memory access" in line for line in said)
    assert any("gpu a GPU" in line for line in said)


def test_records_are_those_of_other_benchmarks(tmp_path: Path) -> None:
    path = tmp_path / "gpu.jsonl"
    ledger.write(path, RECORDS)
    read = ledger.Ledger(path).records()
    assert [each.cell for each in read] == [each.cell for each in RECORDS]
    assert [tables.label(each.cell) for each in read] == [each.cell.method for each in RECORDS]
    assert tables.tables(read) == []
    with pytest.raises(origin.ConfigurationError, match="is not for a plan"):
        plan.cells_of({"kind": ["gpu"], "workload": ["ranks"], "method": ["gloo"]})


def test_pages_say_what_was_measured(tmp_path: Path) -> None:
    for page in (gpu_docs.PAGE, gpu_docs.TABLES):
        (tmp_path / page).write_text((Path(__file__).parents[2] / "docs" / page).read_text())
    few = {"ResNet-50": gpu_docs.ROWS["ResNet-50"]}
    with mock.patch.object(gpu_docs, "ROWS", few):
        assert "| ResNet-50, 60 ms, assumed | 36 | 18 | 4.6 |" in gpu_docs.break_even([])
        gpu_docs.write(tmp_path, RECORDS)
    pays, benchmarks = ((tmp_path / page).read_text() for page in (gpu_docs.PAGE, gpu_docs.TABLES))
    assert "| ResNet-50, 50 ms, measured, a GPU | 43 |" in pays
    assert "1.0% to 1.0%, measured |" in pays
    assert pays.count("when it pays: begin") == 1
    assert "| sign: encode | 100 | 80% | 75% |" in benchmarks
    assert "| ResNet-50 | acpsgd | 50.50 | +1.0% |" in benchmarks
    assert [each.cell for each in gpu_docs.kept(tmp_path)] == [each.cell for each in RECORDS]
    (tmp_path / gpu_docs.PAGE).write_text("no place")
    with mock.patch.object(gpu_docs, "ROWS", {}), pytest.raises(origin.ConfigurationError, match="has no lines"):
        gpu_docs.write(tmp_path, [])
    with pytest.raises(origin.ConfigurationError, match=r"there is no .*gpus\.md; give the folder"):
        gpu.run(None, None, tmp_path / "elsewhere", rehearse=True)
    (tmp_path / gpu_docs.TABLES).unlink()
    with pytest.raises(origin.ConfigurationError, match=r"has no lines|there is no"):
        gpu_docs.write(tmp_path, RECORDS[:1])
    assert len(gpu_docs.kept(tmp_path)) == len(RECORDS)


@without_a_gpu
def test_a_picture_or_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpu.png"
    gpu_picture.draw(RECORDS, path)
    assert path.stat().st_size > 10_000
    with (
        mock.patch.object(gpu, "measure", lambda device, told, keep: [keep(each) for each in RECORDS[3:5]]),
        mock.patch.dict(sys.modules, {"matplotlib": None, "matplotlib.figure": None}),
    ):
        gpu.run(tmp_path / "gpu.jsonl", path, None, rehearse=True)
    assert "No picture: matplotlib" in capsys.readouterr().out
    assert len(ledger.Ledger(tmp_path / "gpu.jsonl").records()) == 2
    with (
        mock.patch.object(gpu, "measure", lambda device, told, keep: [keep(each) for each in RECORDS]),
        pytest.raises(origin.ConfigurationError.__mro__[1], match="1 of 8 measurements failed"),
    ):
        gpu.run(None, None, None, rehearse=True)
