"""What a segment's scale is made of, sums, the largest magnitude and counts: by tiles, added up in a defined order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.code import Code
from gradwire.kernels.compensated import Compensated
from gradwire.kernels.gpu._jitted import (
    CHUNK,
    COLUMNS,
    INFINITE,
    INFINITY,
    LANES,
    compensated,
    magnitude_bits,
    place_of,
    sum_of_lanes,
    tile_of,
)
from gradwire.kernels.gpu._launch import Tiles, jitted, launch

AT_ONCE = tl.constexpr(16)
"""Rows of lanes that are loaded before the first is added."""


class Jitted(NamedTuple):
    """What a code is to the kernels: functions that are jitted, and constants; all take the code as a constant first.

    Attributes:
        scale: ``(code, first, second, peak, negatives, numel)``: the words of a finite segment, two of them, from sums
            of terms, the bits of the largest magnitude, and counts; all are blocks of one number.
        put: ``(code, t, first, second, random, table)``: a code for each value.
        read: ``(code, codes, first, second, table)``: what codes stand for.
        terms: ``(code, t)``: two numbers of float64 that are added up over a segment, or None.
        draws: Whether ``put`` is given random bits.
        table: Numbers that ``put`` and ``read`` look up, on a device.
        constant: What these functions are compiled for, without what they look up; the code itself if None.
    """

    scale: Any
    put: Any
    read: Any
    terms: Any = None
    draws: bool = False
    table: Callable[[torch.device], Tensor] | None = None
    constant: Any = None


def measure(
    own: Jitted, code: Code, tiles: Tiles, source: Compensated, scales: Tensor, stride: int, leave: bool = False
) -> None:
    """Fills the scales of all segments, with NaN where a value is not finite.

    Args:
        own: What is measured.
        code: What that is of.
        tiles: Of the segments.
        source: Their values.
        scales: To be filled.
        stride: From one block's payload to the next.
        leave: Whether compensated values are left in the residual where they are finite.
    """
    (gradient, residual, beta, gamma), device = source, source.gradient.device
    sums = torch.empty(2 * tiles.count if own.terms else 0, dtype=torch.float64, device=device)
    marks = torch.empty(2 * tiles.count, dtype=torch.int32, device=device)
    launch(
        _measure_tiles,
        tiles.count,
        tiles.table,
        gradient,
        gradient if residual is None else residual,
        sums,
        marks,
        beta,
        gamma,
        CODE=code,
        TERMS=own.terms,
        KEEP=residual is not None,
        LEAVE=leave and residual is not None,
        **tiles.shape | ({"warps": 1} if own.terms else {}),
    )
    launch(
        _add_up,
        tiles.segment_count,
        tiles.table,
        tiles.segments,
        tiles.runs,
        tiles.numels,
        sums,
        marks,
        scales,
        tiles.payloads(code, stride),
        CODE=code,
        TERMS=own.terms,
        SCALE=own.scale,
        WORDS=max(code.layout.words, 1),
        warps=1,
    )


@triton.jit
def statistics(
    gradient,
    residual,
    start,
    count,
    beta,
    gamma,
    CODE: tl.constexpr,
    TERMS: tl.constexpr,
    KEEP: tl.constexpr,
    LEAVE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Sums of terms, largest magnitude and number of negative values of a tile, each a block of one number."""
    if TERMS is None:
        i = tl.arange(0, WIDTH)
        t, r = compensated(gradient, residual, start + i, i < count, beta, gamma, KEEP)
        if LEAVE:
            tl.store(residual + start + i, tl.where(tl.abs(t) < INFINITY, t, r), mask=i < count)
        peak = tl.max(magnitude_bits(t), axis=0, keep_dims=True)
        nothing = tl.zeros((1,), tl.float64)
        return nothing, nothing, peak, tl.zeros((1,), tl.int32)
    else:
        lane = tl.arange(0, LANES)
        first = tl.zeros((LANES,), tl.float64)
        second = tl.zeros((LANES,), tl.float64)
        peak = tl.zeros((LANES,), tl.int32)
        negatives = tl.zeros((LANES,), tl.int32)
        last = count.to(tl.int32)
        for begin in range(0, last, AT_ONCE * LANES):
            rows = ()
            for row in tl.static_range(AT_ONCE):
                i = begin + row * LANES + lane
                rows += (compensated(gradient, residual, start + i, i < last, beta, gamma, KEEP),)  # type: ignore[assignment]
            for row in tl.static_range(AT_ONCE):  # zeros beyond the last change no sum
                t = rows[row][0]
                a, b = TERMS(CODE, t)
                first += a
                second += b
                peak = tl.maximum(peak, magnitude_bits(t))
                negatives += tl.where(t < 0, 1, 0)
                if LEAVE:
                    i = begin + row * LANES + lane
                    tl.store(residual + start + i, tl.where(tl.abs(t) < INFINITY, t, rows[row][1]), mask=i < last)
        largest = tl.max(peak, axis=0, keep_dims=True)
        return sum_of_lanes(first), sum_of_lanes(second), largest, tl.sum(negatives, axis=0, keep_dims=True)


@jitted("beta", "gamma")
def _measure_tiles(
    table,
    gradient,
    residual,
    sums,
    marks,
    beta,
    gamma,
    CODE: tl.constexpr,
    TERMS: tl.constexpr,
    KEEP: tl.constexpr,
    LEAVE: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    start, count, _, _, _ = tile_of(table, ALIGNED)
    first, second, peak, negatives = statistics(
        gradient, residual, start, count, beta, gamma, CODE, TERMS, KEEP, LEAVE, WIDTH
    )
    at = 2 * tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    if TERMS is not None:
        tl.store(sums + at, first)
        tl.store(sums + at + 1, second)
    tl.store(marks + at, peak)
    tl.store(marks + at + 1, negatives)


@jitted("scales")
def _add_up(
    table,
    segments,
    runs,
    numels,
    sums,
    marks,
    scales,
    places,
    CODE: tl.constexpr,
    TERMS: tl.constexpr,
    SCALE: tl.constexpr,
    WORDS: tl.constexpr,
):
    """One program a segment: totals of tiles, which are chunks, in lanes as values are."""
    segment = tl.program_id(0)
    one = tl.arange(0, 1)
    first_run = tl.load(segments + segment)
    last_run = tl.load(segments + segment + 1)
    first_tile, last = tl.load(runs + first_run), tl.load(runs + last_run)
    first = tl.zeros((1,), tl.float64)
    second = tl.zeros((1,), tl.float64)
    if TERMS is not None:
        lane = tl.arange(0, LANES)
        for group in range(first_tile, last, CHUNK):
            ones = tl.zeros((LANES,), tl.float64)
            others = tl.zeros((LANES,), tl.float64)
            end = tl.minimum(group + CHUNK, last)
            for row in tl.range(group, end, LANES, loop_unroll_factor=16):
                mask = row + lane < end
                ones += tl.load(sums + 2 * (row + lane), mask=mask, other=0.0)
                others += tl.load(sums + 2 * (row + lane) + 1, mask=mask, other=0.0)
            first += sum_of_lanes(ones)
            second += sum_of_lanes(others)
    i = tl.arange(0, 256)
    peak = tl.zeros((256,), tl.int32)
    negatives = tl.zeros((256,), tl.int32)
    for tile in tl.range(first_tile, last, 256, loop_unroll_factor=4):
        mask = tile + i < last
        peak = tl.maximum(peak, tl.load(marks + 2 * (tile + i), mask=mask, other=0))
        negatives += tl.load(marks + 2 * (tile + i) + 1, mask=mask, other=0)
    largest = tl.max(peak, axis=0, keep_dims=True)
    below = tl.sum(negatives, axis=0, keep_dims=True)
    before, _, _ = place_of(places, table + COLUMNS * first_tile)
    numel = tl.load(numels + segment + one)
    store_scale(scales + before, segment, first, second, largest, below, numel, CODE, SCALE, WORDS)


@triton.jit
def store_scale(
    scales, segment, first, second, peak, negatives, numel, CODE: tl.constexpr, SCALE: tl.constexpr, WORDS: tl.constexpr
):
    """Writes the words of a segment, NaN if it is not finite, and returns them."""
    finite = peak < INFINITE
    low, high = SCALE(CODE, first, second, peak, negatives, numel)
    low = tl.where(finite, low, float("nan"))
    high = tl.where(finite, high, float("nan"))
    at = scales + WORDS * segment + tl.arange(0, 1)
    tl.store(at, low)
    if WORDS == 2:
        tl.store(at + 1, high)
    return low, high
