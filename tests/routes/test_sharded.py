"""Shards: every element has one owner, and what lies alike takes as many bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from catalogue import cases
from gradwire.engine.configuration import Configuration
from gradwire.layout import ALIGNMENT, Block, Granularity, flat_slots, shard_bounds
from gradwire.memory import Store
from gradwire.methods.method import CodecMethod
from models import SHAPES

SLOTS = flat_slots([*SHAPES.items(), ("scalar", ()), ("nothing", (0, 4)), ("few rows", (9, 16)), ("odd", (37,))], 8)
COUNTS = (1, 2, 3, 7, 10, 64, 300)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("scope", ["layer", "bucket", "row", "block:24"])
def test_every_element_is_its_owners_in_the_order_and_the_segments_of_the_block(scope: str, rows: bool) -> None:
    parsed = Granularity.parse(scope)
    block = Block.cut(SLOTS, Granularity(parsed.scope, parsed.size, rows, parsed.length))
    segment_of = np.full(SLOTS[-1].stop, -1)
    for segment, (first, last) in enumerate(zip(block.segments, block.segments[1:], strict=False)):
        for start, length, _ in block.runs[first:last]:
            segment_of[start : start + length] = segment
    for count in COUNTS:
        shards = block.shards(count)
        assert len(shards) == count
        for owner, shard in enumerate(shards):
            expected = []
            for slot, unit in zip(SLOTS, block.units, strict=True):
                low, high = shard_bounds(slot.numel, owner, count, int(unit))
                expected.append(np.arange(slot.offset + low, slot.offset + high))
            pieces = [np.arange(start, start + length) for start, length, _ in shard.runs]
            assert np.array_equal(np.concatenate([*pieces, []]), np.concatenate(expected))
            padded = -(-shard.runs[:, 1] // ALIGNMENT) * ALIGNMENT
            assert np.array_equal(shard.runs[:, 2], np.cumsum(padded) - padded)
            offsets = np.array([slot.offset for slot in SLOTS])[shard.slot_of_run]
            assert np.array_equal(shard.runs[:, 0], offsets + shard.origins)
            found = segment_of[shard.runs[:, 0]]
            assert np.array_equal(shard.segments, [*np.flatnonzero(np.diff(found, prepend=-1)), len(found)])


@pytest.mark.parametrize("scope", ["layer", "bucket", "pairs", "block:24"])
def test_of_each_kind_there_is_one(scope: str) -> None:
    """All but where it lies and what its numbers are drawn from is that of one of them, and no two are alike."""

    def kind(shard: Block) -> tuple[bytes, ...]:
        within = shard.origins % shard.units[shard.slot_of_run]
        return tuple(each.tobytes() for each in (shard.runs[:, 1:], shard.segments, shard.slot_of_run, within))

    block = Block.cut(SLOTS, Granularity.parse("block:24" if scope == "pairs" else scope))
    if scope == "pairs":  # segments of two runs each
        block = replace(block, segments=np.append(block.segments[:-1:2], block.segments[-1]))
    for count in COUNTS:
        shards = block.shards(count)
        kinds = [kind(each) for each in shards.different]
        assert sorted(kinds) == sorted({kind(each) for each in shards})


@pytest.mark.parametrize("count", COUNTS)
def test_shards_of_one_kind_take_as_many_bytes(count: int) -> None:
    """By every codec that shards: whoever asks one of each kind knows the sizes of all."""
    slots, asked = [slot for slot in SLOTS if slot.numel], set()
    for case in cases():
        configuration = Configuration.make(case.method, case.options, *case.choices)
        method, granularity = configuration.method, configuration.granularity
        if configuration.route != "sharded" or not isinstance(method, CodecMethod) or (method, granularity) in asked:
            continue
        shards = Block.cut(slots, granularity).shards(count)
        codec = method.codec().installed(Store(torch.device("cpu")), slots, SLOTS[-1].stop)
        sizes = [{codec.payload_bytes(shard) for shard in some} for some in (shards, shards.different)]
        assert sizes[0] == sizes[1], str(case)
        asked.add((method, granularity))
    assert asked
