"""Sums of sparse rows, a program a tile: rows with ascending positions are added while the tile lies in a cache.

Whether positions ascend and lie in runs is known when all have been read; if not, another launch does it again, slowly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.gpu._jitted import COLUMNS, run_of, tile_of
from gradwire.kernels.gpu._launch import Tiles, jitted, launch
from gradwire.layout import Int64Array

_WIDTH = 256
_PIECE = tl.constexpr(128)
_PART = tl.constexpr(1024)
NOWHERE = tl.constexpr(2**63 - 1)
"""No position."""

_OWNERS = 256
"""Programs that go through all positions where these do not ascend."""


def sum_rows(tiles: Tiles, positions: Tensor, values: Tensor, counts: Int64Array, out: Tensor, weight: float) -> Tensor:
    """Writes ``weight * sum`` to all of the tiles; the least position that lies in no run, :data:`NOWHERE` if none."""
    device, rows = out.device, len(positions)
    starts = torch.empty(rows * (tiles.count + 1), dtype=torch.int32, device=device)
    bad = torch.full((2,), NOWHERE.value, dtype=torch.int64, device=device)
    given = (positions, values, positions.stride(0), values.stride(0), tiles.asked("rows", counts, lambda: counts))
    launch(_find_starts, triton.cdiv(len(starts), _WIDTH), tiles.table, tiles.count, starts, *given, rows, WIDTH=_WIDTH)
    shape = {"WIDTH": tiles.width, "ALIGNED": tiles.aligned}
    launch(_sum_tile, tiles.count, tiles.table, tiles.count, starts, *given, rows, bad, out, weight, **shape)
    owners = min(_OWNERS, tiles.count)
    again = (tiles.table, tiles.count, triton.cdiv(tiles.count, owners), tiles.places, len(tiles.places), tiles.steps)
    launch(_sum_again, owners, *again, *given, rows, bad, out, weight, **shape)
    return bad[0]


@jitted("tiles", "stride", "values_stride", "rows")
def _find_starts(table, tiles, starts, positions, values, stride, values_stride, counts, rows, WIDTH: tl.constexpr):
    """Numbers of the first positions of a row that are not before each tile, where positions ascend."""
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    mask = i < rows * (tiles + 1)
    row = i // (tiles + 1)
    tile = i - row * (tiles + 1)
    count = tl.load(counts + row, mask=mask, other=0)
    first = tl.load(table + COLUMNS * tile + 2, mask=mask & (tile < tiles), other=0)
    low = tl.zeros((WIDTH,), tl.int64)
    high = tl.where(tile == 0, 0, count)
    low = tl.where(tile == tiles, count, low)
    while tl.max(high - low, axis=0) > 0:
        middle = (low + high) // 2
        before = tl.load(positions + row * stride + middle, mask=low < high, other=0) < first
        high = tl.where((low < high) & (before == 0), middle, high)
        low = tl.where((low < high) & before, middle + 1, low)
    tl.store(starts + i, low.to(tl.int32), mask=mask)


@jitted("tiles", "stride", "values_stride", "rows", "weight", "values")
def _sum_tile(
    table,
    tiles,
    starts,
    positions,
    values,
    stride,
    values_stride,
    counts,
    rows,
    bad,
    out,
    weight,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    start, count, position, _, _ = tile_of(table, ALIGNED)
    i = tl.arange(0, _PART)
    for first in range(0, count, _PART):
        tl.store(out + start + first + i, tl.zeros((_PART,), tl.float32), mask=first + i < count)
    tl.debug_barrier()
    wrong = tl.zeros((_PIECE,), tl.int32)
    for row in range(rows):
        begin = starts + tl.cast(row, tl.int64) * (tiles + 1) + tl.program_id(0)
        stop = tl.load(begin + 1)
        begin = tl.load(begin)
        own = positions + tl.cast(row, tl.int64) * stride
        wrong |= (begin > stop).to(tl.int32)
        for piece in range(begin, stop, _PIECE):
            k = piece + tl.arange(0, _PIECE)
            mask = k < stop
            offset = tl.load(own + k, mask=mask, other=0) - position
            before = tl.load(own + k - 1, mask=mask & (k > 0), other=-1) - position
            right = (offset >= 0) & (offset < count) & ((offset > before) | (k == 0))
            wrong |= (mask & (right == 0)).to(tl.int32)
            value = tl.load(values + tl.cast(row, tl.int64) * values_stride + k, mask=mask, other=0.0)
            at = out + start + offset
            tl.store(at, tl.load(at, mask=mask & right, other=0.0) + value, mask=mask & right)
        tl.debug_barrier()
    for first in range(0, count, _PART):
        at = out + start + first + i
        tl.store(at, tl.load(at, mask=first + i < count, other=0.0) * weight, mask=first + i < count)
    worst = tl.max(wrong, axis=0)
    tl.atomic_min(bad + 1, 0, mask=worst > 0, sem="relaxed")


@jitted("tiles", "each", "runs", "steps", "stride", "values_stride", "rows", "weight", "values")
def _sum_again(
    table,
    tiles,
    each,
    places,
    runs,
    steps,
    positions,
    values,
    stride,
    values_stride,
    counts,
    rows,
    bad,
    out,
    weight,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Does all again where positions do not ascend or lie in no run: a program looks for those of its tiles in all."""
    if tl.load(bad + 1) == 0:
        low = tl.program_id(0) * each
        high = tl.minimum(low + each, tiles)
        i = tl.arange(0, _PART)
        if low < high:
            for tile in range(low, high):
                start = tl.load(table + COLUMNS * tl.cast(tile, tl.int64))
                count = tl.load(table + COLUMNS * tl.cast(tile, tl.int64) + 1)
                for first in range(0, count, _PART):
                    tl.store(out + start + first + i, tl.zeros((_PART,), tl.float32), mask=first + i < count)
            tl.debug_barrier()
            begin = tl.load(table + COLUMNS * tl.cast(low, tl.int64) + 2)
            last = table + COLUMNS * tl.cast(high - 1, tl.int64)
            end = tl.load(last + 2) + tl.load(last + 1)
            for row in range(rows):
                filled = tl.load(counts + row)
                for piece in range(0, filled, _PART):
                    mask = piece + i < filled
                    position = tl.load(positions + tl.cast(row, tl.int64) * stride + piece + i, mask=mask, other=0)
                    run = run_of(places, 0, runs, steps, position, 3)
                    offset = position - tl.load(places + 3 * run)
                    inside = (offset >= 0) & (offset < tl.load(places + 3 * run + 1))
                    outside = mask & (inside == 0)
                    if tl.program_id(0) == 0:
                        tl.atomic_min(bad, tl.min(tl.where(outside, position, NOWHERE), axis=0), sem="relaxed")
                    mask = mask & inside & (position >= begin) & (position < end)
                    value = tl.load(values + tl.cast(row, tl.int64) * values_stride + piece + i, mask=mask, other=0.0)
                    at = out + tl.load(places + 3 * run + 2) + offset
                    tl.store(at, tl.load(at, mask=mask, other=0.0) + value, mask=mask)
                tl.debug_barrier()
            for tile in range(low, high):
                start = tl.load(table + COLUMNS * tl.cast(tile, tl.int64))
                count = tl.load(table + COLUMNS * tl.cast(tile, tl.int64) + 1)
                for first in range(0, count, _PART):
                    at = out + start + first + i
                    tl.store(at, tl.load(at, mask=first + i < count, other=0.0) * weight, mask=first + i < count)
