"""A run repeated with the same seed: the same bytes, losses and parameters, in every kind of training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gradwire.codecs.select.variance import SQUARES
from gradwire.local.world import LocalWorld, Step
from gradwire_bench.cell import Cell
from gradwire_bench.suite.ledger import Ledger
from gradwire_bench.suite.run import Runner, measure
from gradwire_bench.tasks import Share
from gradwire_bench.workloads import WORKLOADS

pytestmark = pytest.mark.usefixtures("begun_quickly")

NAME = "3.weight"
"""Of a convolution."""

FIGURES = ("losses", "loss", "accuracy", "metered_bytes", "sent_bytes", "parameters")


def figures(cells: list[Cell], folder: Path) -> list[dict[str, Any]]:
    ledger = Ledger(folder)
    Runner(ledger, "gradwire bench suite", "digits", 1).run(cells, lambda news, done: None)
    records = ledger.records(cells)
    assert [each.error for each in records] == [None] * len(cells)
    return [{name: each.result[name] for name in FIGURES if name in each.result} for each in records]


@pytest.mark.parametrize("kind", ["train", "local"])
def test_processes_end_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    axes: dict[str, Any] = {"workers": 2, "steps": 6, "batch": 4, "every": 2 if kind == "local" else 0}
    methods = ("acpsgd:rank=2", "powersgd:rank=2", "qsgd:bits=4")
    cells = [Cell(kind, "image", method, **axes) for method in methods]  # type: ignore[arg-type]
    first, again = figures(cells, tmp_path / "first"), figures(cells, tmp_path / "again")
    assert first == again
    assert all(len(each["parameters"]) == 16 and each["metered_bytes"] > 0 for each in first)
    assert len({each["parameters"] for each in first}) == len(cells)


@pytest.mark.parametrize("method", ["acpsgd:rank=2", "powersgd:rank=2", "variance:moments=samples", "qsgd:bits=2"])
def test_workers_in_one_process_end_with_the_same_bits(method: str) -> None:
    cell = Cell("trial", "alexnet", method, workers=2, steps=3, batch=2)
    (first, _, failed), (again, _, _) = measure(cell, "digits"), measure(cell, "digits")
    assert failed is None
    assert first == again
    assert len(first["parameters"]) == 16
    other = measure(Cell("trial", "alexnet", method, workers=2, steps=3, batch=2, seed=1), "digits")[0]
    assert other["parameters"] != first["parameters"]


def test_squares_are_of_each_workers_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[Tensor]] = []
    usual = LocalWorld.average

    def average(world: LocalWorld, gradients: Sequence[Tensor]) -> Step:
        kept = [engine.store.get(SQUARES, NAME) for engine in world.engines]
        seen.append([each.clone() for each in kept if each is not None])
        return usual(world, gradients)

    monkeypatch.setattr(LocalWorld, "average", average)
    measure(Cell("trial", "alexnet", "variance:moments=samples", workers=2, steps=2, batch=3), "digits")
    workload = WORKLOADS["alexnet"]
    source = workload.locate("digits")
    torch.manual_seed(0)
    net = workload.model(source, small=True)
    inputs, wanted = next(workload.task(source, Share(6, seed=0)).batches())
    weight = dict(net.named_parameters())[NAME]
    for rank, found in enumerate(seen[0]):
        expected = torch.zeros_like(weight)
        for sample in range(rank, 6, 2):
            loss = F.cross_entropy(net(inputs[sample : sample + 1]), wanted[sample : sample + 1]) / 3
            expected += torch.autograd.grad(loss, weight)[0].square()
        torch.testing.assert_close(found, expected)
    assert [len(each) for each in seen] == [2, 2]
    assert not torch.equal(seen[0][0], seen[1][0])
