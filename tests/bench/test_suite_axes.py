"""Axes of cells beside the first ones: frameworks, backends, routes, devices; and figures made of several records."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire import cli
from gradwire.errors import ConfigurationError
from gradwire_bench import launch, periodic, placement, trial
from gradwire_bench.cell import AXES, Cell, Record
from gradwire_bench.periodic_plans import FULL, Run
from gradwire_bench.periodic_results import Outcome
from gradwire_bench.suite import compare, page
from gradwire_bench.suite.ledger import Ledger, write
from gradwire_bench.suite.measures import MEASURES, gains
from gradwire_bench.suite.plan import load
from gradwire_bench.suite.run import Runner, heats
from gradwire_bench.suite.tables import tables
from gradwire_bench.suite.targets import SHARE, targeted
from gradwire_bench.workloads import IMAGE
from suite_records import record


def trained(method: str = "dense", seed: int = 0, curve: tuple[float, ...] = (), **axes: Any) -> Record:
    cell = Cell("train", axes.pop("workload", "image"), method, link="100mbit", seed=seed, **axes)
    points = [{"step": 10 * n, "seconds": 2.0 * n, "accuracy": each} for n, each in enumerate(curve, start=1)]
    figures = {"accuracy": 0.8, "step_seconds": [0.2, 0.1, 0.2], "peak_bytes": 1, "phases": {}, "curve": points}
    return record(cell, **figures, metered_bytes=1.0, dense_bytes=2.0, target_accuracy=0.85, seconds_to_target=None)


def test_a_route_is_part_of_the_contender_and_others_have_their_kinds() -> None:
    assert Cell("sync", "tiny", "efsignsgd", route="gather").contender == "efsignsgd:route=gather"
    both = Cell("sync", "tiny", "qsgd:bits=4", "layer", route="sharded")
    assert both.contender == "qsgd:bits=4,granularity=layer,route=sharded"
    assert Cell("sync", "tiny", "ddp", route="gather").contender == "ddp"
    for wrong, said in (
        ({"route": "gathr"}, "gather"),
        ({"framework": "keras"}, "framework='keras' is not known; choose one of torch, keras-tf"),
        ({"framework": "jax", "method": "ddp"}, "'dense' takes the place of 'ddp'"),
        ({"framework": "jax", "device": "cuda"}, "on the processor"),
        ({"backend": "mpi"}, "choose one of gloo, nccl"),
        ({"device": "tpu"}, "choose one of cpu, cuda"),
        ({"kind": "trial", "framework": "jax"}, "choose kind train"),
        ({"kind": "codec", "route": "gather"}, "choose kind trial or train or local or sync"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            Cell(**{"kind": "train", "workload": "image", "method": "topk", **wrong})


def test_records_from_before_an_axis_load_with_its_usual_value() -> None:
    plain = record(Cell("train", "image", "topk")).plain()
    for axis in ("route", "framework", "backend", "device"):
        del plain["cell"][axis]
    assert Record.of(plain).cell == Cell("train", "image", "topk")
    plain["result"]["framework"] = "keras-tf"  # where it was before
    assert Record.of(plain).cell.framework == "keras-tf"


def test_frameworks_do_not_race_and_are_not_compared(tmp_path: Path) -> None:
    torchs, others = (
        [trained("ddp"), trained("topk")],
        [trained("dense", framework="jax"), trained("topk", framework="jax")],
    )
    cells = [each.cell for each in (*torchs, *others)]
    assert [len(heat) for heat in heats(cells)] == [2, 2]
    routes = [Cell("sync", "tiny", "qsgd", route=route) for route in ("gather", "sharded")]
    assert [len(heat) for heat in heats(routes)] == [2]
    slow = [dataclasses.replace(each, result={**each.result, "step_seconds": [9.0]}) for each in others]
    assert list(compare.changes(torchs, slow, 0.0)) == []
    lost, found = compare.lost_and_found(torchs, slow)
    assert [len(lost), len(found)] == [2, 2]
    (table,) = tables([*torchs, *slow])
    assert [line.values["framework"].text for line in table.lines] == ["torch", "torch", "jax", "jax"]
    assert [line.values["x DDP"].text for line in table.lines] == ["1.00"] * 4  # each against its own dense averages
    assert "framework" not in tables(torchs)[0].columns
    assert gains(others) == {"dense": 0.0, "topk": 0.0}
    html = page.html([*torchs, *slow], "A title", "About.")
    assert html.count("jax") > 2


def test_local_steps_are_those_of_the_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def trained(*given: object, optimizer: str, **named: object) -> list[Any]:
        asked.append(optimizer)
        return [Outcome(Run(FULL, 0, 1, 0.1), 2, error="not here")]

    monkeypatch.setattr(periodic, "train", trained)
    names = ["sgd", "momentum", "nesterov", "adamw"]
    cells = [Cell("local", "image", "dense", optimizer=name, workers=2, every=2) for name in names]
    Runner(Ledger(tmp_path), "gradwire bench suite", "digits", 1).run(cells, lambda news, done: None)
    assert asked == names


def test_throughput_is_of_all_workers_and_of_the_median_step() -> None:
    assert MEASURES["throughput"].of(trained(workers=4, batch=8)) == pytest.approx(160)
    assert MEASURES["throughput"].of(trained(workers=2)) == pytest.approx(2 * IMAGE.batch / 0.2)
    assert MEASURES["throughput"].of(record(Cell("sync", "tiny", "ddp"), seconds=[1.0])) is None
    (table,) = tables([trained("ddp", workers=4, batch=8)])
    assert table.lines[0].values["samples/s"].text == "160.0"


@pytest.mark.filterwarnings("error")  # of pictures without room for what is in them
def test_the_target_is_that_of_dense_averages_in_the_same_heat() -> None:
    records = [
        trained("ddp", 0, (0.5, 0.7, 0.8)),
        trained("topk", 0, (0.6, 0.78, 0.7)),
        trained("qsgd", 0, (0.6, 0.7, 0.75)),
        trained("ddp", 1, (0.3, 0.4, 0.4)),
        trained("topk", 1, (0.3, 0.3, 0.4)),
        trained("qsgd", 1, (0.3, 0.3, 0.3)),
        trained("topk", 2, (0.3, 0.4, 0.5)),  # without dense averages
        trained("ddp", 0, (0.1, 0.1, 0.1), workload="alexnet"),  # which learnt nothing
        trained("ddp", 0, (0.1, 0.2), workload="lstm"),  # of which nobody knows when
    ]
    found = [(each.result["target_accuracy"], each.result["seconds_to_target"]) for each in targeted(records)]
    high, low = SHARE * 0.8, SHARE * 0.4
    assert found == [
        (high, 6.0),
        (high, 4.0),
        (high, None),
        (low, 4.0),
        (low, 6.0),
        (low, None),
        *[(None, None)] * 3,
    ]
    assert records[0].result["target_accuracy"] == 0.85  # as measured
    (table,) = tables(targeted([each for each in records if each.cell.seed < 2]))
    shown = [[line.values[name].text for name in ("target %", "s to target")] for line in table.lines]
    mean = f"{100 * (high + low) / 2:.1f}"
    assert shown == [[mean, "5.0 ± 1.0"], [mean, "5.0 ± 1.0"], [mean, "not reached"], *[["", ""]] * 2]
    curves = "Quality by steps, seconds and bytes"
    assert curves not in page.html(records[-1:], "A title", "About.")  # nor is there anything that DDP raced with
    html = page.html(records[:3], "A title", "About.")
    assert curves in html
    assert f"{100 * high:.1f}" in html
    assert f"{SHARE:.0%}" in html


def test_a_device_that_is_not_here_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    started: list[object] = []
    monkeypatch.setattr(launch.lab, "Lab", started.append)
    for arguments in (
        ["bench", "train", "--device", "cuda", "--out", str(tmp_path)],
        ["bench", "suite", "--device", "cuda", "--out", str(tmp_path)],
        ["reproduce", "layerwise", "--device", "cuda", "--out", str(tmp_path)],
    ):
        monkeypatch.setattr(sys, "argv", ["gradwire", *arguments])
        assert cli.main() != 0
        assert "torch sees no GPU here" in capsys.readouterr().err
    with pytest.raises(ConfigurationError, match="torch sees no GPU"):
        trial.run(trial.Trial("image", "sgd", 2, "ddp", 0.1, 0), 1, lambda step: None, device="cuda")
    with pytest.raises(ConfigurationError, match="backend='nccl' is for device 'cuda', not 'cpu'"):
        placement.check("cpu", "nccl")
    assert not started
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    placement.check("cuda", "gloo", 4)
    with pytest.raises(ConfigurationError, match="workers=2 is more than 1, the GPUs here"):
        placement.check("cuda", "nccl", 2)


def test_a_plan_moves_to_a_device_where_torch_trains() -> None:
    plan = load("presets", "small").on("cuda")
    assert {cell.kind for cell in plan.cells if cell.device == "cuda"} == {"trial", "train"}
    assert all(cell.device == "cuda" for cell in plan.cells if cell.kind in ("trial", "train"))


def test_the_help_lists_every_axis(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gradwire", "bench", "suite", "--help"])
    cli.main()
    words = capsys.readouterr().out.replace(",", " ").split()
    assert {*AXES} <= {word.strip(".") for word in words}


def test_bench_train_writes_what_it_trained_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--workers", "1", "--steps", "2", "--batch", "4", "--link", "none", "--dataset", "digits"]
    monkeypatch.setattr(sys, "argv", ["gradwire", "bench", "train", "ddp", *arguments, "--out", str(tmp_path)])
    assert cli.main() == 0
    (one,) = Ledger.read(tmp_path / "train.jsonl").records()
    assert (one.cell.framework, one.cell.backend, one.cell.device) == ("torch", "gloo", "cpu")
    assert "framework" not in one.result
    assert MEASURES["throughput"].of(one)
    write(tmp_path / "again.jsonl", [one])
    assert Ledger.read(tmp_path / "again.jsonl").records() == [one]
