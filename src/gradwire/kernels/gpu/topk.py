"""The largest magnitudes of each segment, exactly: of equal ones the first, all in order of position.

Magnitudes are compared as the 31 bits that they are. Where every segment is one tile, one program finds the bits of the
smallest magnitude to be chosen, one after another, and writes what is chosen. Else all tiles together find it; then
each counts, and writes to where those before it end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.compensated import Compensated
from gradwire.kernels.gpu._edges import COUNTED, LOWER, PEAK, STATE, WANT, WANTED, arrives_last, find_edges, wanted_of
from gradwire.kernels.gpu._jitted import INFINITE, INFINITY, compensated, magnitude_bits, tile_of
from gradwire.kernels.gpu._launch import jitted, launch, tiles_of, warps
from gradwire.layout import Block, Int64Array

PART = 1024
"""Values of a tile that are written at once: for more there are too few registers."""

_TILES = tl.constexpr(1024)
"""Tiles whose places are found at once."""


def topk_select(block: Block, source: Compensated, counts: Int64Array, positions: Tensor, values: Tensor) -> None:
    gradient, residual, beta, gamma = source
    tiles, keep = tiles_of(block, gradient.device), residual is not None
    memory = gradient if residual is None else residual
    if tiles.whole:
        arguments = (tiles.table, gradient, memory, tiles.wanted(counts), positions, values, beta, gamma)
        launch(_select, tiles.count, *arguments, **tiles.shape, KEEP=keep)
        return
    wanted = wanted_of(tiles, counts)
    states, peaks = find_edges(tiles, source, wanted)
    numbers = torch.empty(tiles.count, dtype=torch.int32, device=gradient.device)
    places = torch.empty(2 * tiles.count, dtype=torch.int64, device=gradient.device)
    found = (tiles.table, memory, wanted, states, peaks, numbers, places)
    launch(_count_chosen, tiles.count, *found, tiles.segments, tiles.runs, **tiles.shape)
    part = min(tiles.width, PART)
    launch(_write_chosen, tiles.count, *found, positions, values, **tiles.shape | {"warps": warps(part) * 2}, PART=part)


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


@triton.jit
def _largest_and_ties(t, mask, finite, edge):
    """Which values of a tile are larger than the edge, and which may be chosen: with its magnitude.

    In a segment that is not finite these are all.
    """
    bits = magnitude_bits(t)
    return mask & finite & (bits > edge), mask & ((bits == edge) | (finite == 0))


@triton.jit
def _state_of(wanted, states, segment, WIDTH: tl.constexpr):
    """For each place of a tile whether its segment is finite; the edge, and how many with its magnitude are chosen."""
    state = states + STATE * segment
    peak = tl.load(state + PEAK)
    some = tl.where(peak < INFINITE, tl.load(state + WANT), tl.load(wanted + WANTED * segment).to(tl.int32))
    return tl.zeros((WIDTH,), tl.int32) + peak < INFINITE, tl.load(state + LOWER), some


@triton.jit
def _count_chosen(
    table,
    source,
    wanted,
    states,
    peaks,
    numbers,
    places,
    segments,
    runs,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Counts what is larger than the edge, in the lower half of a number, and what equals it, in the upper half."""
    start, count, _, segment, _ = tile_of(table, ALIGNED)
    finite, edge, some = _state_of(wanted, states, segment, WIDTH)
    i = tl.arange(0, WIDTH)
    peak = tl.zeros((WIDTH,), tl.int32) + tl.load(peaks + tl.program_id(0))
    mask = (i < count) & ((peak >= edge) | (finite == 0))
    t = tl.load(source + start + i, mask=mask, other=0.0)
    largest, tied = _largest_and_ties(t, mask, finite, edge)
    tl.store(numbers + tl.program_id(0), tl.sum(largest.to(tl.int32) + (tied.to(tl.int32) << 16), axis=0))
    row = wanted + WANTED * segment
    if arrives_last(states + STATE * segment + COUNTED, tl.load(row + 2)):
        first = tl.load(runs + tl.load(segments + segment))
        _find_places(numbers, places, first, tl.load(row + 2), tl.load(row + 1), some)


@triton.jit
def _find_places(numbers, places, first, count, at, some):
    """For each tile of a segment: where its first choice goes, and how many ties lie before it."""
    before = some * 0
    for done in range(0, count, _TILES):
        i = done + tl.arange(0, _TILES)
        number = tl.load(numbers + first + i, mask=i < count, other=0, cache_modifier=".cg")
        tied = number >> 16
        earlier = before + tl.cumsum(tied, axis=0) - tied
        chosen = (number & 0xFFFF) + tl.minimum(tl.maximum(some - earlier, 0), tied)
        tl.store(places + 2 * (first + i), at + tl.cumsum(chosen, axis=0) - chosen, mask=i < count)
        tl.store(places + 2 * (first + i) + 1, earlier.to(tl.int64), mask=i < count)
        before += tl.sum(tied, axis=0)
        at += tl.sum(chosen, axis=0)


@jitted("positions", "values")
def _write_chosen(
    table,
    source,
    wanted,
    states,
    peaks,
    numbers,
    places,
    positions,
    values,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
    PART: tl.constexpr,
):
    start, count, position, segment, _ = tile_of(table, ALIGNED)
    tile = tl.program_id(0).to(tl.int64)
    finite, edge, some = _state_of(wanted, states, segment, PART)
    number = tl.load(numbers + tile)
    left = tl.maximum(some - tl.load(places + 2 * tile + 1).to(tl.int32), 0)
    if (number & 0xFFFF) + tl.minimum(number >> 16, left) > 0:
        at = tl.load(places + 2 * tile) - 1
        before = tl.zeros((1,), tl.int32)
        for first in range(0, WIDTH, PART):
            i = first + tl.arange(0, PART)
            mask = i < count
            t = tl.load(source + start + i, mask=mask, other=0.0)
            largest, tied = _largest_and_ties(t, mask, finite, edge)
            own = largest.to(tl.int32) + (tied.to(tl.int32) << 16)
            upto = before + tl.cumsum(own, axis=0)
            before += tl.sum(own, axis=0, keep_dims=True)
            chosen = largest | (tied & ((upto >> 16) <= left))
            further = (upto & 0xFFFF) + tl.minimum(upto >> 16, left)
            tl.store(values + at + further, tl.where(finite, t, float("nan")), mask=chosen)
            tl.store(positions + at + further, position + i, mask=chosen)
