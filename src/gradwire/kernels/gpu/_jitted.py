"""What the jitted kernels share: compensated values, defined sums, hashes."""

from __future__ import annotations

import triton
import triton.language as tl

from gradwire.kernels.reference import _torch
from gradwire.randomness import FIRST_FACTOR, SECOND_FACTOR

INFINITY = tl.constexpr(float("inf"))
INFINITE = tl.constexpr(0x7F800000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
SMALLEST_SCALE = tl.constexpr(_torch.SMALLEST_SCALE)
LARGEST_SCALE = tl.constexpr(_torch.LARGEST_SCALE)
CHUNK = tl.constexpr(_torch.CHUNK)
LANES = tl.constexpr(_torch.LANES)
_FIRST_FACTOR = tl.constexpr(FIRST_FACTOR)
_SECOND_FACTOR = tl.constexpr(SECOND_FACTOR)
NEGATIVE = tl.constexpr(-(2**31))
COLUMNS = tl.constexpr(7)


@triton.jit
def tile_of(table, ALIGNED: tl.constexpr, BACK: tl.constexpr = False):
    """First element, number of elements, position, segment, and where the row of the table is.

    Programs that go back begin with the last tile, of which most is in a cache if others have just gone through all.
    """
    number = tl.program_id(0)
    if BACK:
        number = tl.num_programs(0) - 1 - number
    row = table + number.to(tl.int64) * COLUMNS
    start = tl.load(row)
    count = tl.load(row + 1)
    if ALIGNED:
        start = tl.multiple_of(start, 4)
        count = tl.multiple_of(count, 4)
    return start, count, tl.load(row + 2), tl.load(row + 3), row


@triton.jit
def place_of(places, row):
    """Where the payload of a tile begins: its scales, in words, its body, in bytes; and how far apart its parts are."""
    place = places + 3 * tl.load(row + 6)
    return tl.load(place), tl.load(place + 1), tl.load(place + 2)


@triton.jit
def run_of(begins, low, high, steps, wanted, STRIDE: tl.constexpr):
    """The last of runs ``low`` to ``high - 1`` that begins at ``wanted`` or before, or the first."""
    low = low + tl.zeros_like(wanted)
    high = high + tl.zeros_like(wanted)
    for _ in range(steps):
        middle = (low + high) // 2
        before = tl.load(begins + STRIDE * middle) <= wanted
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit
def compensated(gradient, residual, at, mask, beta, gamma, KEEP: tl.constexpr):
    """``t`` and the residual, 0 beyond the mask."""
    g = tl.load(gradient + at, mask=mask, other=0.0)
    r = g
    t = g
    if KEEP:
        r = tl.load(residual + at, mask=mask, other=0.0)
        t = r * beta + g * gamma
    return t, r


@triton.jit
def magnitude_bits(t):
    """Bits of ``|t|``, ordered as magnitudes are; at least ``INFINITE`` if not finite."""
    return t.to(tl.int32, bitcast=True) & MAGNITUDE


@triton.jit
def sum_of_lanes(lanes):
    """Adds the upper half of the lanes to the lower half until one is left: two summands have one order."""
    lanes = tl.sum(tl.reshape(lanes, (2, 16)), axis=0)
    lanes = tl.sum(tl.reshape(lanes, (2, 8)), axis=0)
    lanes = tl.sum(tl.reshape(lanes, (2, 4)), axis=0)
    lanes = tl.sum(tl.reshape(lanes, (2, 2)), axis=0)
    return tl.sum(tl.reshape(lanes, (2, 1)), axis=0)


@triton.jit
def mix64(value):
    """See :func:`gradwire.randomness.mix64`."""
    value = value + tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    value = (value ^ (value >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    value = (value ^ (value >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return value ^ (value >> 31)


@triton.jit
def key_of_run(low, high, stream):
    """``mix64(key ^ stream)`` of a key in two halves."""
    key = (high.to(tl.uint64) << 32) | (low.to(tl.uint64) & tl.full((), 0xFFFFFFFF, tl.uint64))
    return mix64(stream.to(tl.uint64, bitcast=True) ^ key)


@triton.jit
def hash32(key, counter):
    """See :func:`gradwire.randomness.hash32`; as uint32, and the counter too."""
    bits = counter ^ (key & tl.full((), 0xFFFFFFFF, tl.uint64)).to(tl.uint32)
    bits = (bits ^ (bits >> 16)) * tl.full((), _FIRST_FACTOR, tl.uint32)
    bits = (bits ^ (bits >> 15) ^ (key >> 32).to(tl.uint32)) * tl.full((), _SECOND_FACTOR, tl.uint32)
    return bits ^ (bits >> 15)


@triton.jit
def less(integers, other: tl.constexpr):
    """Integers from 0 to ``2**22`` less another such one, as ``float32``: a whole number by its place in the bits."""
    return (integers | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + other)


@triton.jit
def negated(values, where):
    """Values, negated where told; Triton's own minus makes no -0.0 of 0."""
    return tl.where(where, values * -1.0, values)


@triton.jit
def inverse_of(scale, one):
    """``one / scale``, correctly rounded; 0 for a scale that is not positive."""
    return tl.where(scale > 0, tl.div_rn(one, tl.where(scale > 0, scale, 1.0)), 0.0)
