"""The smallest magnitude to be chosen in each segment, and how many of its size.

A sample of a segment says between which two magnitudes it lies but for bad luck. While ``t`` is written, what is above
these is counted, and what lies between, in bins. The tile of a segment that ends last finds the bin; the next passes do
the same with the bin's magnitudes, or with all that remain where luck was bad, and nothing where one is left.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.compensated import Compensated
from gradwire.kernels.gpu._jitted import INFINITE, INFINITY, MAGNITUDE, compensated, magnitude_bits, run_of, tile_of
from gradwire.kernels.gpu._launch import Tiles, jitted, launch
from gradwire.layout import Int64Array

SAMPLES = 4096
"""Elements of a segment that are looked at first."""

PASSES = 4
"""Of bins, the first one with what the sample says: the others suffice for all bits without it."""

_BITS = tl.constexpr(12)
_BINS = tl.constexpr(1 << 12)
_OCTAVE = tl.constexpr(1 << 23)
_GOLDEN = tl.constexpr(0x9E3779B9)

WANTED = tl.constexpr(6)
"""Columns of :func:`wanted_of`: how many, how many in earlier segments, tiles, stride and two ranks of the sample."""

STATE = tl.constexpr(8)
"""Numbers that are kept for each segment, by these columns, and for all of them in a row before."""

LOWER = tl.constexpr(0)
UPPER = tl.constexpr(1)
SHIFT = tl.constexpr(2)
WANT = tl.constexpr(3)
PEAK = tl.constexpr(4)
ABOVE = tl.constexpr(5)
ARRIVED = tl.constexpr(6)
COUNTED = tl.constexpr(7)


def wanted_of(tiles: Tiles, counts: Int64Array) -> Tensor:
    """``int64[S, 6]``, see ``WANTED``; kept until other numbers are asked for."""

    def table() -> Int64Array:
        numels = tiles.segment_numels
        stride = -(-numels // SAMPLES)
        expected = counts / stride
        spread = np.where(stride > 1, 4 * np.sqrt(expected) + 3, 0)
        ranks = (np.ceil(expected + spread).astype(np.int64), np.floor(expected - spread).astype(np.int64))
        return np.stack((counts, np.cumsum(counts) - counts, tiles.segment_tiles, stride, *ranks), axis=1)

    return tiles.asked(f"edges by {SAMPLES}", counts, table)


def find_edges(tiles: Tiles, source: Compensated, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """States of which ``LOWER`` is the edge and ``WANT`` how many of its size are chosen, and the peak of each tile.

    Leaves ``t`` in the residual.
    """
    gradient, residual, beta, gamma = source
    device, segments, keeps = gradient.device, tiles.segment_count, residual is not None
    memory = gradient if residual is None else residual
    numbers = torch.zeros((segments + 1) * STATE.value + segments * _BINS.value, dtype=torch.int32, device=device)
    states, bins = numbers[STATE.value :], numbers[(segments + 1) * STATE.value :]
    peaks = torch.empty(tiles.count, dtype=torch.int32, device=device)
    sampled = (gradient, memory, wanted, tiles.numels, tiles.segments, tiles.elements, tiles.places, tiles.steps)
    launch(_sample, segments, *sampled, states, beta, gamma, KEEP=keeps, SAMPLES=SAMPLES, warps=8)
    first = (tiles.table, gradient, memory, wanted, numbers, states, bins, peaks, beta, gamma)
    launch(_keep, tiles.count, *first, KEEP=keeps, **tiles.shape)
    others: tuple[Any, ...] = (tiles.table, memory, wanted, numbers, states, bins, peaks, segments)
    for _ in range(PASSES - 1):
        launch(_narrow_down, tiles.count, *others, **tiles.shape)
    return states, peaks


@triton.jit
def arrives_last(arrived, tiles):
    """Whether all other tiles have come here before; what they wrote can be read then."""
    tl.debug_barrier()
    return tl.atomic_add(arrived, 1, sem="acq_rel") == tiles - 1


@triton.jit
def _shift_of(reach):
    """Bits that are dropped of differences up to ``reach`` so that the bins suffice."""
    shift = reach * 0
    for more in tl.static_range(19):
        shift += ((reach >> (_BITS + more)) > 0).to(tl.int32)
    return shift


@jitted("steps", "beta", "gamma")
def _sample(
    gradient,
    residual,
    wanted,
    numels,
    segments,
    elements,
    places,
    steps,
    states,
    beta,
    gamma,
    KEEP: tl.constexpr,
    SAMPLES: tl.constexpr,
):
    """Magnitudes of a sample, one of each stretch, that have most likely too many and too few above them."""
    segment = tl.program_id(0).to(tl.int64)
    row = wanted + WANTED * segment
    want = tl.load(row).to(tl.int32)
    stride = tl.load(row + 3)
    most = tl.load(row + 4).to(tl.int32)
    least = tl.load(row + 5).to(tl.int32)
    i = tl.arange(0, SAMPLES)
    chance = i.to(tl.uint32) * tl.full((), _GOLDEN, tl.uint32)
    element = i * stride + ((chance.to(tl.uint64) * stride.to(tl.uint64)) >> 32).to(tl.int64)
    mask = element < tl.load(numels + segment)
    element = tl.where(mask, element, 0)
    run = run_of(elements, tl.load(segments + segment), tl.load(segments + segment + 1), steps, element, 2)
    at = tl.load(places + 3 * run + 2) + element - tl.load(elements + 2 * run)
    t, _ = compensated(gradient, residual, at, mask, beta, gamma, KEEP)
    bits = tl.where(mask, magnitude_bits(t), -1)
    lower = want * 0
    upper = want * 0
    for step in range(31):
        bit = 1 << (30 - step)
        reaching = (bits >= (lower | bit)).to(tl.int32) + ((bits >= (upper | bit)).to(tl.int32) << 16)
        counted = tl.sum(reaching, axis=0)
        lower = tl.where((counted & 0xFFFF) >= most, lower | bit, lower)
        upper = tl.where((counted >> 16) >= tl.maximum(least, 1), upper | bit, upper)
    upper = tl.where(least < 1, tl.minimum(upper, MAGNITUDE - _OCTAVE) + _OCTAVE, upper)
    lower = tl.where(want > 0, lower, MAGNITUDE)
    upper = tl.where(want > 0, upper, MAGNITUDE)
    state = states + STATE * segment
    tl.store(state + LOWER, lower)
    tl.store(state + UPPER, upper)
    tl.store(state + SHIFT, _shift_of(upper - lower))
    tl.store(state + WANT, want)


@triton.jit
def _count(bits, mask, state, bins):
    """Counts what lies between the bounds in bins; how many are above.

    The lowest and the highest bin of a tile get theirs at once: equal magnitudes are often many.
    """
    lower = tl.load(state + LOWER)
    upper = tl.load(state + UPPER)
    inside = mask & (bits >= lower) & (bits <= upper)
    own = tl.where(inside, bits - lower, 0) >> tl.load(state + SHIFT)
    low = tl.min(tl.where(inside, own, _BINS), axis=0)
    high = tl.max(tl.where(inside, own, -1), axis=0)
    above = ((mask & (bits > upper)).to(tl.int32) << 16) + (inside & (own == low)).to(tl.int32)
    counted = tl.sum(above, axis=0)
    highest = tl.sum((inside & (own == high)).to(tl.int32), axis=0)
    tl.atomic_add(bins + low, counted & 0xFFFF, mask=low < _BINS, sem="relaxed")
    tl.atomic_add(bins + high, highest, mask=high > low, sem="relaxed")
    tl.atomic_add(bins + own, 1, mask=inside & (own > low) & (own < high), sem="relaxed")
    return counted >> 16


@triton.jit
def _narrow(numbers, state, bins, FIRST: tl.constexpr):
    """Makes the bounds those of the bin where the edge is, and the bins zero again; other bounds if it is in none."""
    i = tl.arange(0, _BINS)
    counted = tl.load(bins + i, cache_modifier=".cg")
    tl.store(bins + i, tl.zeros((_BINS,), tl.int32))
    lower = tl.load(state + LOWER)
    upper = tl.load(state + UPPER)
    shift = tl.load(state + SHIFT)
    want = tl.load(state + WANT)
    above = want * 0
    if FIRST:
        above = tl.load(state + ABOVE, cache_modifier=".cg")
    reaching = tl.cumsum(counted, axis=0, reverse=True)
    total = tl.sum(counted, axis=0)
    found = tl.maximum(tl.sum((above + reaching >= want).to(tl.int32), axis=0) - 1, 0)
    larger = above + tl.sum(tl.where(i > found, counted, 0), axis=0)
    bottom = lower + (found << shift)
    top = bottom + tl.minimum((1 << shift) - 1, upper - bottom)
    if FIRST:
        higher = above >= want
        fewer = above + total < want
        bottom = tl.where(higher, upper + 1, tl.where(fewer, 0, bottom))
        top = tl.where(higher, MAGNITUDE, tl.where(fewer, lower - 1, top))
        larger = tl.where(higher, 0, tl.where(fewer, above + total, larger))
        known = (want == 0) | (tl.load(state + PEAK, cache_modifier=".cg") >= INFINITE)
        bottom = tl.where(known, MAGNITUDE, bottom)
        top = tl.where(known, MAGNITUDE, top)
        larger = tl.where(known, want, larger)
    tl.store(state + LOWER, bottom)
    tl.store(state + UPPER, top)
    tl.store(state + SHIFT, _shift_of(top - bottom))
    tl.store(state + WANT, want - larger)
    tl.store(state + ARRIVED, 0)
    tl.atomic_add(numbers, 1, mask=bottom == top, sem="relaxed")


@jitted("beta", "gamma")
def _keep(
    table,
    gradient,
    residual,
    wanted,
    numbers,
    states,
    bins,
    peaks,
    beta,
    gamma,
    KEEP: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Leaves ``t`` in the residual, and counts."""
    start, count, _, segment, _ = tile_of(table, ALIGNED)
    i = tl.arange(0, WIDTH)
    mask = i < count
    t, r = compensated(gradient, residual, start + i, mask, beta, gamma, KEEP)
    if KEEP:
        tl.store(residual + start + i, tl.where(tl.abs(t) < INFINITY, t, r), mask=mask)
    bits = magnitude_bits(t)
    peak = tl.max(bits, axis=0)
    tl.store(peaks + tl.program_id(0), peak)
    state = states + STATE * segment
    own = bins + segment * _BINS
    tl.atomic_max(state + PEAK, peak, sem="relaxed")
    above = _count(bits, mask, state, own)
    tl.atomic_add(state + ABOVE, above, mask=above > 0, sem="relaxed")
    if arrives_last(state + ARRIVED, tl.load(wanted + WANTED * segment + 2)):
        _narrow(numbers, state, own, FIRST=True)


@jitted("segments")
def _narrow_down(
    table, source, wanted, numbers, states, bins, peaks, segments, WIDTH: tl.constexpr, ALIGNED: tl.constexpr
):
    """Counts again where bounds are still apart."""
    if tl.load(numbers) < segments:
        start, count, _, segment, _ = tile_of(table, ALIGNED)
        state = states + STATE * segment
        lower = tl.load(state + LOWER)
        if lower < tl.load(state + UPPER):
            i = tl.arange(0, WIDTH)
            peak = tl.zeros((WIDTH,), tl.int32) + tl.load(peaks + tl.program_id(0))
            mask = (i < count) & (peak >= lower)
            bits = magnitude_bits(tl.load(source + start + i, mask=mask, other=0.0))
            own = bins + segment * _BINS
            _count(bits, mask, state, own)
            if arrives_last(state + ARRIVED, tl.load(wanted + WANTED * segment + 2)):
                _narrow(numbers, state, own, FIRST=False)
