"""The largest magnitudes of each segment, exactly: of equal ones the first, all in order of position.

Magnitudes are compared as the 31 bits that they are. Where every segment is one tile, one program finds the bits of the
smallest magnitude to be chosen, one after another, and writes what is chosen. Else the smallest is found digit by digit
from histograms of all tiles; then tiles are counted, and each writes to where those before it end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.compensated import Compensated
from gradwire.kernels.gpu._jitted import INFINITE, INFINITY, compensated, magnitude_bits, tile_of
from gradwire.kernels.gpu._launch import jitted, launch, tiles_of, warps
from gradwire.layout import Block, Int64Array

_DIGITS = ((20, 11), (10, 10), (0, 10))
"""Where digits of a magnitude begin, and their bits, from the highest."""


def topk_select(block: Block, source: Compensated, counts: Int64Array, positions: Tensor, values: Tensor) -> None:
    gradient, residual, beta, gamma = source
    tiles, device, keep = tiles_of(block, gradient.device), gradient.device, residual is not None
    memory, wanted = gradient if residual is None else residual, tiles.wanted(counts)
    shape = {"WIDTH": tiles.width, "ALIGNED": tiles.aligned, "warps": warps(tiles.width)}
    if tiles.whole:
        arguments = (tiles.table, gradient, memory, wanted, positions, values, beta, gamma)
        launch(_select, tiles.count, *arguments, **shape, KEEP=keep)
        return
    segments = block.segment_count
    peaks = torch.zeros(segments, dtype=torch.int32, device=device)
    smallest, ties = torch.zeros_like(peaks), wanted[:, 0].int()
    for number, (shift, bits) in enumerate(_DIGITS):
        histograms = torch.zeros(segments << bits, dtype=torch.int32, device=device)
        arguments = (tiles.table, gradient, memory, smallest, peaks, histograms, beta, gamma)
        launch(_count_digits, tiles.count, *arguments, **shape, KEEP=keep, FIRST=not number, SHIFT=shift, BITS=bits)
        launch(_find_digit, segments, histograms, smallest, ties, BITS=bits)
    found = (tiles.table, memory, wanted, smallest, ties, peaks)
    numbers = torch.empty(2 * tiles.count, dtype=torch.int32, device=device)
    launch(_count_chosen, tiles.count, *found, numbers, **shape)
    places = torch.empty(2 * tiles.count, dtype=torch.int64, device=device)
    launch(_find_places, segments, tiles.segments, tiles.runs, wanted, ties, peaks, numbers, places)
    launch(_write_chosen, tiles.count, *found, places, positions, values, **shape)


@triton.jit
def _largest_and_ties(table, source, wanted, smallest, ties, peaks, WIDTH: tl.constexpr, ALIGNED: tl.constexpr):
    """Which values of a tile are chosen in any case, which may be, how many of those, the values, and positions.

    In a segment that is not finite the first are chosen, and all are NaN.
    """
    start, count, position, segment, _ = tile_of(table, ALIGNED)
    i = tl.arange(0, WIDTH)
    mask = i < count
    t = tl.load(source + start + i, mask=mask, other=0.0)
    finite = tl.broadcast_to(tl.load(peaks + segment + tl.arange(0, 1)), (WIDTH,)) < INFINITE
    edge = tl.load(smallest + segment)
    bits = magnitude_bits(t)
    tied = mask & ((bits == edge) | (finite == 0))
    some = tl.where(finite, tl.load(ties + segment), tl.load(wanted + 2 * segment).to(tl.int32))
    return mask & finite & (bits > edge), tied, some, tl.where(finite, t, float("nan")), position + i


@triton.jit
def _store_chosen(chosen, at, t, place, positions, values):
    """Writes what is chosen to consecutive places from ``at`` on."""
    number = at + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.store(positions + number, place, mask=chosen)
    tl.store(values + number, t, mask=chosen)


@jitted("positions", "values", "beta", "gamma")
def _select(
    table,
    gradient,
    residual,
    wanted,
    positions,
    values,
    beta,
    gamma,
    KEEP: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    start, count, position, segment, _ = tile_of(table, ALIGNED)
    i = tl.arange(0, WIDTH)
    mask = i < count
    t, r = compensated(gradient, residual, start + i, mask, beta, gamma, KEEP)
    if KEEP:
        tl.store(residual + start + i, tl.where(tl.abs(t) < INFINITY, t, r), mask=mask)
    bits = tl.where(mask, magnitude_bits(t), -1)
    want = tl.load(wanted + 2 * segment).to(tl.int32)
    finite = tl.broadcast_to(tl.max(bits, axis=0, keep_dims=True), (WIDTH,)) < INFINITE
    edge = want * 0
    for step in range(31):
        higher = edge | (1 << (30 - step))
        edge = tl.where(tl.sum((bits >= higher).to(tl.int32), axis=0) >= want, higher, edge)
    largest = finite & (bits > edge)
    tied = mask & ((bits == edge) | (finite == 0))
    some = want - tl.sum(largest.to(tl.int32), axis=0)
    chosen = largest | (tied & (tl.cumsum(tied.to(tl.int32), axis=0) <= some))
    at = tl.load(wanted + 2 * segment + 1)
    _store_chosen(chosen, at, tl.where(finite, t, float("nan")), position + i, positions, values)


@jitted("beta", "gamma")
def _count_digits(
    table,
    gradient,
    residual,
    smallest,
    peaks,
    histograms,
    beta,
    gamma,
    KEEP: tl.constexpr,
    FIRST: tl.constexpr,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Counts the digits of those that have the digits before; the first time leaves ``t`` in the residual."""
    start, count, _, segment, _ = tile_of(table, ALIGNED)
    i = tl.arange(0, WIDTH)
    mask = i < count
    if FIRST:
        t, r = compensated(gradient, residual, start + i, mask, beta, gamma, KEEP)
        if KEEP:
            tl.store(residual + start + i, tl.where(tl.abs(t) < INFINITY, t, r), mask=mask)
        bits = magnitude_bits(t)
        tl.atomic_max(peaks + segment, tl.max(bits, axis=0), sem="relaxed")
    else:
        bits = magnitude_bits(tl.load(residual + start + i, mask=mask, other=0.0))
        mask = mask & ((bits >> (SHIFT + BITS)) == tl.load(smallest + segment))
    digit = tl.arange(0, 1 << BITS)
    counted = tl.histogram((bits >> SHIFT) & ((1 << BITS) - 1), 1 << BITS, mask=mask)
    tl.atomic_add(histograms + (segment << BITS) + digit, counted, mask=counted > 0, sem="relaxed")


@triton.jit
def _find_digit(histograms, smallest, ties, BITS: tl.constexpr):
    """Appends the next digit of the smallest magnitude, and takes what is larger from those that are wanted."""
    segment = tl.program_id(0).to(tl.int64)
    digit = tl.arange(0, 1 << BITS)
    counted = tl.load(histograms + (segment << BITS) + digit)
    want = tl.load(ties + segment)
    reaching = tl.cumsum(counted, axis=0, reverse=True)
    found = tl.sum((reaching >= want).to(tl.int32), axis=0) - 1
    larger = tl.sum(tl.where(digit > found, counted, 0), axis=0)
    tl.store(ties + segment, want - larger)
    tl.store(smallest + segment, (tl.load(smallest + segment) << BITS) | found)


@triton.jit
def _count_chosen(table, source, wanted, smallest, ties, peaks, numbers, WIDTH: tl.constexpr, ALIGNED: tl.constexpr):
    largest, tied, _, _, _ = _largest_and_ties(table, source, wanted, smallest, ties, peaks, WIDTH, ALIGNED)
    tile = tl.program_id(0).to(tl.int64)
    tl.store(numbers + 2 * tile, tl.sum(largest.to(tl.int32), axis=0))
    tl.store(numbers + 2 * tile + 1, tl.sum(tied.to(tl.int32), axis=0))


@triton.jit
def _find_places(segments, runs, wanted, ties, peaks, numbers, places):
    """For each tile of a segment: where its first choice goes, and how many ties lie before it."""
    segment = tl.program_id(0).to(tl.int64)
    one = tl.arange(0, 1)
    finite = tl.load(peaks + segment + one) < INFINITE
    some = tl.where(finite, tl.load(ties + segment + one), tl.load(wanted + 2 * segment + one).to(tl.int32))
    at = tl.load(wanted + 2 * segment + 1 + one)
    before = tl.zeros((1,), tl.int32)
    last = tl.load(runs + tl.load(segments + segment + 1))
    i = tl.arange(0, 256)
    for first in range(tl.load(runs + tl.load(segments + segment)), last, 256):
        mask = first + i < last
        largest = tl.load(numbers + 2 * (first + i), mask=mask, other=0)
        tied = tl.load(numbers + 2 * (first + i) + 1, mask=mask, other=0)
        earlier = before + tl.cumsum(tied, axis=0) - tied
        chosen = largest + tl.minimum(tl.maximum(some - earlier, 0), tied)
        tl.store(places + 2 * (first + i), at + tl.cumsum(chosen, axis=0) - chosen, mask=mask)
        tl.store(places + 2 * (first + i) + 1, earlier.to(tl.int64), mask=mask)
        before += tl.sum(tied, axis=0)
        at += tl.sum(chosen, axis=0)


@jitted("positions", "values")
def _write_chosen(
    table,
    source,
    wanted,
    smallest,
    ties,
    peaks,
    places,
    positions,
    values,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    largest, tied, some, t, place = _largest_and_ties(table, source, wanted, smallest, ties, peaks, WIDTH, ALIGNED)
    tile = tl.program_id(0).to(tl.int64)
    rank = tl.load(places + 2 * tile + 1) + tl.cumsum(tied.to(tl.int32), axis=0)
    chosen = largest | (tied & (rank <= some))
    _store_chosen(chosen, tl.load(places + 2 * tile), t, place, positions, values)
