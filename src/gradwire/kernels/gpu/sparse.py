"""Selected coordinates.

A position that lies in no run is an error that the host is told of a step later; until then the nearest place of a run
stands for it, so that nothing else is touched, or none.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.deferred import learn
from gradwire.kernels.gpu._jitted import COLUMNS, INFINITY, hash32, key_of_run, mix64, run_of
from gradwire.kernels.gpu._launch import halves, jitted, launch, tiles_of
from gradwire.kernels.gpu._sparse_sum import NOWHERE, sum_rows
from gradwire.kernels.reference import sparse
from gradwire.kernels.reference.sparse import lies_in_no_run
from gradwire.layout import Block, Int64Array

_WIDTH = 1024
_ROUNDS = tl.constexpr(sparse.FEISTEL_ROUNDS // 2)
GATHER, SUBTRACT, SCATTER, PUT = range(4)


def gather(block: Block, source: Tensor, positions: Tensor, values: Tensor) -> None:
    _at(GATHER, block, source, positions, values)


def subtract(block: Block, residual: Tensor, positions: Tensor, values: Tensor) -> None:
    _at(SUBTRACT, block, residual, positions, values)


def scatter(block: Block, target: Tensor, positions: Tensor, values: Tensor) -> None:
    _at(SCATTER, block, target, positions, values)


def scatter_sum(
    block: Block,
    positions: Tensor,
    values: Tensor,
    out: Tensor,
    weight: float,
    filled: Int64Array | None = None,
) -> None:
    counts = np.full(len(positions), positions.shape[1]) if filled is None else filled
    if len(counts) > 1 and counts.any():
        _refuse_if_empty(block, positions[int(counts.argmax())])
        bad = sum_rows(tiles_of(block, out.device), positions, values, counts, out, weight)
        _expect_none(block, bad)
        return
    if parts := block.parts(out):
        torch._foreach_zero_(parts)
        if not 0 <= weight < math.inf:
            torch._foreach_mul_(parts, weight)
    for row, own, count in zip(positions, values, counts.tolist(), strict=True):
        _at(PUT, block, out, row[:count], own, weight)


def randomk_positions(block: Block, counts: Int64Array, positions: Tensor, key: int) -> None:
    tiles = tiles_of(block, positions.device)
    pieces = tiles.pieces(counts, _WIDTH)
    arguments = (pieces, tiles.segments, tiles.elements, tiles.table, tiles.runs, tiles.numels)
    launch(_choose, len(pieces), *arguments, tiles.steps, *halves(key), positions, WIDTH=_WIDTH)


def _refuse_if_empty(block: Block, positions: Tensor) -> None:
    if not len(block.runs):
        raise lies_in_no_run(block, int(positions[0]))


def _expect_none(block: Block, bad: Tensor) -> None:
    """Has PayloadError raised if a position, the least of all that do, lies in no run."""

    def check(found: Tensor) -> None:
        if int(found) != NOWHERE.value:
            raise lies_in_no_run(block, int(found))

    learn(bad, check)


def _at(operation: int, block: Block, buffer: Tensor, positions: Tensor, values: Tensor, weight: float = 1.0) -> None:
    """Reads or changes a flat buffer at positions, which are distinct."""
    count = positions.numel()
    if not count:
        return
    _refuse_if_empty(block, positions)
    tiles = tiles_of(block, buffer.device)
    bad = torch.full((), NOWHERE.value, dtype=torch.int64, device=buffer.device)
    arguments = (tiles.places, len(block.runs), tiles.steps, positions, count, buffer, values, bad, weight)
    launch(_visit, triton.cdiv(count, _WIDTH), *arguments, OPERATION=operation, WIDTH=_WIDTH)
    _expect_none(block, bad)


@jitted("runs", "steps", "positions", "count", "values", "weight")
def _visit(
    places,
    runs,
    steps,
    positions,
    count,
    buffer,
    values,
    bad,
    weight,
    OPERATION: tl.constexpr,
    WIDTH: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    mask = i < count
    position = tl.load(positions + i, mask=mask, other=0)
    run = run_of(places, 0, runs, steps, position, 3)
    offset = position - tl.load(places + 3 * run)
    inside = tl.maximum(tl.minimum(offset, tl.load(places + 3 * run + 1) - 1), 0)
    least = tl.min(tl.where(mask & (offset != inside), position, NOWHERE), axis=0)
    tl.atomic_min(bad, least, mask=least < NOWHERE, sem="relaxed")
    at = buffer + tl.load(places + 3 * run + 2) + inside
    if OPERATION == 0:
        tl.store(values + i, tl.load(at, mask=mask, other=0.0), mask=mask)
    else:
        value = tl.load(values + i, mask=mask, other=0.0)
        old = tl.load(at, mask=mask, other=0.0)
        if OPERATION == 1:
            value = tl.where(tl.abs(value) < INFINITY, old - value, old)
        if OPERATION == 2:
            value = tl.where(value == value, value, old)
        if OPERATION == 3:
            value = (value + 0.0) * weight
        tl.store(at, value, mask=mask)


@triton.jit
def _permuted(element, width, height, key):
    """See ``_permuted`` of the reference."""
    row = element // width
    column = element - row * width
    for _ in tl.static_range(_ROUNDS):
        key = mix64(key)
        row = row + ((hash32(key, column.to(tl.uint32)).to(tl.uint64) * height.to(tl.uint64)) >> 32).to(tl.int64)
        row = tl.where(row >= height, row - height, row)
        key = mix64(key)
        column = column + ((hash32(key, row.to(tl.uint32)).to(tl.uint64) * width.to(tl.uint64)) >> 32).to(tl.int64)
        column = tl.where(column >= width, column - width, column)
    return row * width + column


@jitted("steps", "key_low", "key_high", "positions")
def _choose(pieces, segments, elements, table, runs, numels, steps, key_low, key_high, positions, WIDTH: tl.constexpr):
    piece = pieces + 5 * tl.program_id(0).to(tl.int64)
    segment = tl.load(piece)
    first = tl.load(piece + 1)
    count = tl.load(piece + 2)
    written = tl.load(piece + 3)
    width = tl.load(piece + 4)
    numel = tl.load(numels + segment)
    height = (numel + width - 1) // width
    first_run = tl.load(segments + segment)
    first_tile = table + COLUMNS * tl.load(runs + first_run)
    key = key_of_run(key_low, key_high, tl.load(first_tile + 4))
    key = mix64(key ^ tl.load(first_tile + 5).to(tl.uint64, bitcast=True))
    i = tl.arange(0, WIDTH)
    mask = i < count
    element = _permuted(tl.where(mask, first + i, 0), width, height, key)
    outside = mask & (element >= numel)
    while tl.sum(outside.to(tl.int32), axis=0) > 0:
        element = tl.where(outside, _permuted(tl.where(outside, element, 0), width, height, key), element)
        outside = mask & (element >= numel)
    element = tl.where(mask, element, 0)
    run = run_of(elements, first_run, tl.load(segments + segment + 1), steps, element, 2)
    position = tl.load(elements + 2 * run + 1) + element - tl.load(elements + 2 * run)
    tl.store(positions + written + first + i, position, mask=mask)
