"""What a program sets for all of torch changes nothing of an average: not its bits, not what is sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from catalogue import Case, cases
from gradwire.engine.configuration import Configuration
from gradwire.layout import flat_slots
from gradwire.local.world import LocalWorld
from models import SHAPES, gradient


@contextmanager
def double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SURROUNDINGS = {
    "float64": double_by_default,
    "deterministic": deterministic,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "grad": torch.enable_grad,
}


def averages(case: Case) -> tuple[list[Tensor], int]:
    """What two workers hold after three steps, and what they sent."""
    slots = flat_slots(list(SHAPES.items()))
    world = LocalWorld(Configuration.make(case.method, case.options, *case.choices), slots, workers=2)
    results = []
    for step in range(3):
        buffers = [torch.cat([gradient(name, rank, step).flatten() for name in SHAPES]) for rank in range(2)]
        world.average(buffers)
        results.extend(buffers)
    return results, world.engines[0].meter.wire_bytes


@pytest.mark.parametrize("name", SURROUNDINGS)
@pytest.mark.parametrize("case", {case.method: case for case in reversed(cases())}.values(), ids=str)
def test_surroundings_change_no_bit(case: Case, name: str) -> None:
    expected, sent = averages(case)
    with SURROUNDINGS[name]():
        found, found_sent = averages(case)
    assert found_sent == sent
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
