"""Directions of all matrices at once, in Triton: the bits of the reference, which takes one after another."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from interpreted import by_the_gpu  # noqa: F401
from torch import Tensor

from gradwire.codecs.quantize import SubspaceDeadZone
from gradwire.kernels import Compensated, Places, dispatch, gpu
from gradwire.layout import Block, Granularity, flat_slots
from gradwire.memory import Feedback, Store
from guarded import copied, guarded, release
from kernel_inputs import GRADIENTS, normal, same
from matrices import NUMEL, places, taken_apart_and_put_together


@pytest.mark.parametrize("apart", [0, 5])
@pytest.mark.parametrize("kind", ["normal", "nan", "huge", "signed zeros"])
@pytest.mark.parametrize("remembers", [False, True])
def test_matrices_of_all_shapes_at_once(apart: int, kind: str, remembers: bool) -> None:
    """Nothing between them changes."""
    values = GRADIENTS[kind].repeat(2)[:NUMEL]
    ours, theirs = (taken_apart_and_put_together(each, apart, values, remembers) for each in (gpu, None))
    for found, known in zip(ours, theirs, strict=True):
        assert same(found, known)


@pytest.mark.parametrize("wanted", [False, True])
def test_products_are_added_only_if_a_flag_holds(wanted: bool) -> None:
    table, values, out = places(), normal(1)[:NUMEL], normal(2)[:NUMEL].clone()
    added = out.clone()
    gpu.add_products(table, normal(3), normal(4), values, added)
    gpu.add_products(table, normal(3), normal(4), values, out, torch.tensor(wanted))
    assert same(out, added if wanted else normal(2)[:NUMEL])


SLOTS = flat_slots([("a", (12, 40)), ("vector", (7,)), ("b", (9, 16)), ("c", (12, 40)), ("few", (2, 30))])


def steps(owners: int) -> list[Tensor]:
    """What is written, averaged, remembered and learnt in three steps, the last of values that are not finite."""
    numel, block = SLOTS[-1].stop, Block.cut(SLOTS, Granularity("model", rows=True))
    codec = SubspaceDeadZone(0.8, 3).installed(Store(torch.device("cpu")), SLOTS, numel)
    blocks, feedback, found = list(block.shards(owners)), Feedback(torch.zeros(numel), 0.9, 0.7), []
    payloads = torch.zeros(owners, max(map(codec.payload_bytes, blocks)), dtype=torch.uint8)
    for step in range(3):
        gradient, average = normal(step)[:numel].clone() ** 3, torch.empty(numel)
        if step == 2:
            gradient[100] = torch.inf
        if owners > 1:
            codec.encode_each(blocks, gradient, feedback, payloads, 0)
            codec.decode_each(blocks, payloads, average)
        else:
            codec.encode(block, gradient, feedback, payloads[0], 0)
            codec.decode(block, payloads, average, 0.5)
        kept = feedback.residual
        assert kept is not None
        bases = [each.basis for each in codec.directions.values()]
        found += [each.clone() for each in (payloads, average, kept, *bases)]
    return found


@pytest.mark.parametrize("owners", [1, 3])
def test_the_codec_has_the_bits_of_the_reference(owners: int) -> None:
    """Also where owners have parts of rows."""
    ours = steps(owners)
    with mock.patch.object(dispatch, "overrides", return_value={}):
        theirs = steps(owners)
    for found, known in zip(ours, theirs, strict=True):
        assert same(found, known)


@pytest.mark.parametrize("end", [True, False])
def test_stays_inside(end: bool) -> None:
    table = Places.of([(0, 9, 301, 3, 0, 9, 0)])
    values, out, basis = copied(normal()[: 9 * 301], end), guarded(9 * 301, end), copied(normal(1)[: 3 * 301], end)
    coordinates, drawn = guarded(27, end), copied(normal(2)[:27], end)
    gpu.split_rows_each(table, Compensated(values), basis, coordinates, out)
    gpu.add_products(table, coordinates, basis, out, out, torch.tensor(True))
    coordinates[:9] = 0
    gpu.combine_rows_each(table, gpu.weights_each(table, coordinates, drawn), out, basis)
    del values, out, basis, coordinates, drawn
    release()
