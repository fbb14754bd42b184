"""Selected coordinates.

A position that lies in no run is an error that the host is told of a step later; until then the nearest place of a run
stands for it, so that nothing else is touched.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.deferred import expect
from gradwire.kernels.gpu._jitted import COLUMNS, INFINITY, hash32, key_of_run, mix64, run_of
from gradwire.kernels.gpu._launch import halves, jitted, launch, tiles_of
from gradwire.kernels.reference import sparse
from gradwire.kernels.reference.sparse import lies_in_no_run
from gradwire.layout import Block, Int64Array

_WIDTH = 1024
_ROUNDS = tl.constexpr(sparse.FEISTEL_ROUNDS // 2)
GATHER, SUBTRACT, SCATTER, ADD = range(4)


def gather(block: Block, source: Tensor, positions: Tensor, values: Tensor) -> None:
    _check(block, positions)
    _at(GATHER, block, source, positions, values)


def subtract(block: Block, residual: Tensor, positions: Tensor, values: Tensor) -> None:
    _check(block, positions)
    _at(SUBTRACT, block, residual, positions, values)


def scatter(block: Block, target: Tensor, positions: Tensor, values: Tensor) -> None:
    _check(block, positions)
    _at(SCATTER, block, target, positions, values)


def scatter_sum(
    block: Block,
    positions: Tensor,
    values: Tensor,
    out: Tensor,
    weight: float,
    filled: Int64Array | None = None,
) -> None:
    counts = [positions.shape[1]] * len(positions) if filled is None else filled.tolist()
    rows = [row[:count] for row, count in zip(positions, counts, strict=True)]
    _check(block, torch.cat(rows) if filled is not None else positions.view(-1))
    parts = block.parts(out)
    for part in parts:
        part.zero_()
    for row, own in zip(rows, values, strict=True):
        _at(ADD, block, out, row, own)
    for part in parts:
        part.mul_(weight)


def randomk_positions(block: Block, counts: Int64Array, positions: Tensor, key: int) -> None:
    tiles = tiles_of(block, positions.device)
    pieces = tiles.pieces(counts, _WIDTH)
    arguments = (pieces, tiles.segments, tiles.elements, tiles.table, tiles.runs, tiles.numels)
    launch(_choose, len(pieces), *arguments, tiles.steps, *halves(key), positions, WIDTH=_WIDTH)


def _check(block: Block, positions: Tensor) -> None:
    """Has PayloadError raised if a position lies in no run."""
    if not positions.numel():
        return
    if not len(block.runs):
        raise lies_in_no_run(block, int(positions[0]))
    tiles = tiles_of(block, positions.device)
    bad = torch.full((), positions.numel(), dtype=torch.int64, device=positions.device)
    arguments = (tiles.places, len(block.runs), tiles.steps, positions, positions.numel(), bad)
    launch(_find_bad, triton.cdiv(positions.numel(), _WIDTH), *arguments, WIDTH=_WIDTH)
    expect(bad >= positions.numel(), lambda: lies_in_no_run(block, int(positions[int(bad)])))


def _at(operation: int, block: Block, buffer: Tensor, positions: Tensor, values: Tensor) -> None:
    """Reads or changes a flat buffer at positions, which are distinct."""
    tiles, count = tiles_of(block, buffer.device), positions.numel()
    arguments = (tiles.places, len(block.runs), tiles.steps, positions, count, buffer, values)
    launch(_visit, triton.cdiv(count, _WIDTH), *arguments, OPERATION=operation, WIDTH=_WIDTH)


@jitted("runs", "steps", "positions", "count")
def _find_bad(places, runs, steps, positions, count, bad, WIDTH: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    mask = i < count
    position = tl.load(positions + i, mask=mask, other=0)
    run = run_of(places, 0, runs, steps, position, 3)
    offset = position - tl.load(places + 3 * run)
    outside = (offset < 0) | (offset >= tl.load(places + 3 * run + 1))
    tl.atomic_min(bad, tl.min(tl.where(mask & outside, i, count), axis=0), sem="relaxed")


@jitted("runs", "steps", "positions", "count", "values")
def _visit(places, runs, steps, positions, count, buffer, values, OPERATION: tl.constexpr, WIDTH: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    mask = i < count
    position = tl.load(positions + i, mask=mask, other=0)
    run = run_of(places, 0, runs, steps, position, 3)
    offset = tl.maximum(tl.minimum(position - tl.load(places + 3 * run), tl.load(places + 3 * run + 1) - 1), 0)
    at = buffer + tl.load(places + 3 * run + 2) + offset
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
            value = old + value
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
