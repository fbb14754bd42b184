"""Where parameters lie in a flat buffer changes no bit, and arrays become the matrices that suit low rank."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

from catalogue import Case, cases
from gradwire import methods
from gradwire.engine.configuration import Configuration
from gradwire.layout import Slot, as_matrix, flat_slots
from gradwire.local.world import LocalWorld
from models import SHAPES, gradient

WORKERS, STEPS = 2, 3


@cache
def given(slots: tuple[Slot, ...]) -> tuple[Tensor, Tensor]:
    """Gradients of each step and worker, ``float32[STEPS, WORKERS, numel]``, and which elements are no parameter's."""
    numel = max(slot.stop for slot in slots)
    flats, gaps = torch.zeros(STEPS, WORKERS, numel), torch.ones(numel, dtype=torch.bool)
    for slot in slots:
        gaps[slot.offset : slot.stop] = False
        for step, rank in product(range(STEPS), range(WORKERS)):
            flats[step, rank, slot.offset : slot.stop] = gradient(slot.name, rank, step).view(-1)
    return flats, gaps


def trained(case: Case, slots: tuple[Slot, ...]) -> tuple[list[Tensor], list[int], dict[str, dict[str, Tensor]]]:
    """All averages, what was sent, and what is remembered on rank 1."""
    configuration = Configuration.make(
        case.method, case.options, case.granularity, route=case.route, memory=case.memory
    )
    world, averages, sent = LocalWorld(configuration, slots, WORKERS), [], []
    gradients, gaps = given(slots)
    for step in range(STEPS):
        flats = [each.clone() for each in gradients[step]]
        sent.append(world.average(flats).sent_bytes)
        averages += [flats[0][slot.offset : slot.stop].clone() for slot in slots]
        assert not flats[0][gaps].any(), str(case)
    return averages, sent, world.engines[1].store.state()


@pytest.mark.parametrize("name", methods.names())
def test_places_change_no_bit(name: str) -> None:
    for case in cases():
        if case.method == name:
            check_places(case)


def check_places(case: Case) -> None:
    """With gaps between them, and in another order than that in which they are named, bits are the same."""
    shapes = list(SHAPES.items())[::-1]
    averages, sent, remembered = trained(case, flat_slots(shapes))
    elsewhere = sorted(flat_slots(sorted(shapes), alignment=16), key=lambda slot: shapes.index((slot.name, slot.shape)))
    others, sent_elsewhere, remembered_elsewhere = trained(case, tuple(elsewhere))
    assert sent == sent_elsewhere, str(case)
    assert all(torch.equal(one, other) for one, other in zip(averages, others, strict=True)), str(case)
    assert remembered.keys() == remembered_elsewhere.keys(), str(case)
    for field, tensors in remembered.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, remembered_elsewhere[field][name]), (str(case), field, name)


@pytest.mark.parametrize(
    ("shape", "matrix"),
    [
        ((), ()),
        ((7,), (7,)),
        ((3, 500), (3, 500)),
        ((3, 3, 64, 128), (576, 128)),
        ((7, 7, 3, 64), (147, 64)),
        ((64, 3, 7, 7), (64, 147)),
        ((512, 8, 64), (512, 512)),
        ((8, 64, 512), (512, 512)),
        ((1, 1, 256, 64), (256, 64)),
        ((0, 5, 3), (0, 3)),
    ],
)
def test_arrays_as_matrices(shape: tuple[int, ...], matrix: tuple[int, ...]) -> None:
    assert as_matrix(shape) == matrix
