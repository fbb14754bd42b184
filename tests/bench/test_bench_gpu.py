"""What ``gradwire bench gpu`` does, as far as it can be seen without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from rich.console import Console
from torch import nn

from gradwire import cli, kernels
from gradwire.kernels import codes
from gradwire_bench import gpu, gpu_report, gpu_steps, models, report, shapes
from kernel_inputs import block_of
from pool import ranks

CPU = torch.device("cpu")
BLOCKS = {"layers": block_of([70, 64, 33])}


@pytest.mark.parametrize(("model", "numel"), [(models.ResNet50, 25_557_032), (models.GPT2, 124_439_808)])
def test_models_are_the_known_ones(model: type[nn.Module], numel: int) -> None:
    with torch.device("meta"):
        built = model()
    assert sum(parameter.numel() for parameter in built.parameters()) == numel
    if model is models.ResNet50:
        own = sorted(tuple(parameter.shape) for parameter in built.parameters())
        assert own == sorted(shape for _, shape in shapes.get("resnet50"))


@pytest.mark.parametrize(
    ("model", "batch"), [(models.ResNet50, models.resnet50_batch), (models.GPT2, models.gpt2_batch)]
)
def test_models_have_a_loss(model: type[nn.Module], batch: object) -> None:
    with torch.device("meta"):
        built = model()
    assert built(*batch(2, torch.device("meta"))).shape == ()


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gradwire", "bench", "gpu"])
    assert cli.main() == 2
    assert "sees no GPU here" in capsys.readouterr().err
    assert gpu.main() == 2


def test_a_wrong_bit_is_found() -> None:
    said: list[str] = []

    def spoiling(code: object, block: object, source: object, payload: torch.Tensor, key: int) -> None:
        encode(code, block, source, payload, key)
        if isinstance(code, codes.Exponent) and next(calls) % 4 == 0:
            payload[-5] ^= 1

    encode, calls = kernels.encode, iter(range(1000))
    with mock.patch.object(gpu, "_blocks", return_value=BLOCKS), mock.patch.object(kernels, "encode", spoiling):
        verdicts = list(gpu._bits(CPU, said.append))
    assert [verdict.subject for verdict in verdicts if not verdict.holds] == [f"bits of {codes.Exponent()}"]
    assert len(said) == len(gpu.CODES)
    assert {type(code) for code in gpu.CODES} == set(codes.ALL) - {codes.Integers, codes.NonUniform}


@ranks(1)
def test_what_is_measured() -> None:
    def once(run: object, *others: object) -> float:
        run()
        return 1e-3

    small = {"small": (lambda: Small(), lambda count, device: (torch.randn(count, 8), torch.randn(count, 8)), 4)}
    with (
        mock.patch.object(gpu, "seconds", once),
        mock.patch.object(gpu_steps, "seconds", once),
        mock.patch.object(torch.cuda, "set_sync_debug_mode"),
        mock.patch.object(gpu_steps, "MODELS", small),
        mock.patch.object(gpu_steps, "MOST_ADDED", {"small": 0.01}),
    ):
        speeds = list(gpu._speeds(5000, CPU, 1.0, print))
        waits = [gpu_steps.waits(method, options, CPU, print) for method, options in gpu_steps.METHODS]
        steps = list(gpu_steps.steps("small", CPU, print))
    assert all(speed.of_copy > 0 for speed in speeds)
    assert len({speed.kernel for speed in speeds}) == len(speeds) > 25
    assert [verdict.found for verdict in waits if not verdict.holds] == []
    assert {step.milliseconds for step in steps} == {1.0}
    assert [step.method for step in steps] == ["DDP", *(method for method, _ in gpu_steps.METHODS)]
    measured = gpu_report.Report({"device": "none"}, ("merge_top",), 1.0, [], speeds, waits, steps, ["bits: died"])
    assert len(list(gpu_report.lines(measured))) == 4 + len(speeds) + len(waits) + len(steps)
    for table in report.gpu_tables(measured):
        Console(file=open("/dev/null", "w")).print(table)  # noqa: SIM115
    assert report.document("bench.gpu", report=measured)["report"]["copy"] == 1.0


def test_what_fails_loses_only_itself() -> None:
    kept: list[tuple[int, int]] = []
    found = gpu_report.Report({}, (), 1.0, [], [], [], [], [])

    def broken() -> Iterator[int]:
        yield 1
        raise RuntimeError("an illegal memory access")

    parts = [("bits", found.bits, broken), ("waits", found.waits, lambda: [2, 3])]
    gpu._collected(found, parts, lambda report: kept.append((len(report.bits), len(report.waits))))
    assert (found.bits, found.waits) == ([1], [2, 3])
    assert found.failures == ["bits: RuntimeError: an illegal memory access"]
    assert kept == [(1, 0), (1, 2)]
    with mock.patch.object(gpu, "SECONDS", -1.0):
        gpu._collected(found, parts, lambda report: None)
    assert found.failures[1:] == ["bits: not begun, -1 s had passed", "waits: not begun, -1 s had passed"]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, values: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return (self.layer(values) - wanted).square().mean()
