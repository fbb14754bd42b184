"""Evenly spaced levels."""

from __future__ import annotations

import triton
import triton.language as tl

from gradwire.kernels.gpu._jitted import LARGEST_SCALE, SMALLEST_SCALE, inverse_of, less
from gradwire.kernels.gpu._measured import Jitted
from gradwire.kernels.gpu.quantise import CODES
from gradwire.kernels.reference.qsgd import QSGD


@triton.jit
def squares(code: tl.constexpr, t):
    exact = t.to(tl.float64)
    return exact * exact, tl.zeros_like(exact)


@triton.jit
def usable(norm):
    """A norm of float64 as a scale: 0 if too small to divide by, and no larger than can be decoded."""
    smaller = tl.where(norm > LARGEST_SCALE, LARGEST_SCALE, norm)
    return tl.where(norm >= SMALLEST_SCALE, smaller, 0.0).to(tl.float32)


@triton.jit
def _scale(code: tl.constexpr, first, second, peak, negatives, numel):
    norm = peak.to(tl.float32, bitcast=True).to(tl.float64)
    if code.euclidean:
        norm = tl.sqrt(first)
    scale = usable(norm)
    return scale, scale


@triton.jit
def uniform16(random):
    """The middle of one of ``2**16`` equal parts of [0, 1)."""
    return ((random >> 16).to(tl.int32) | 0x43000000).to(tl.float32, bitcast=True) - (128.0 - 2.0**-17)


@triton.jit
def uniform23(random):
    """The middle of one of ``2**23`` equal parts of [0, 1)."""
    return ((random >> 9).to(tl.int32) | 0x3F800000).to(tl.float32, bitcast=True) - (1.0 - 2.0**-24)


@triton.jit
def _put(code: tl.constexpr, t, first, second, random, table):
    LEVELS: tl.constexpr = (1 << (code.bits - 1)) - 1
    inverse = inverse_of(first, tl.full(t.shape, LEVELS, tl.float32))
    offset = tl.full(t.shape, 0.5, tl.float32)
    if not code.nearest:
        offset = uniform16(random)
    return tl.minimum((t * inverse + (offset + LEVELS)).to(tl.int32), 2 * LEVELS)


@triton.jit
def _read(code: tl.constexpr, codes, first, second, table):
    LEVELS: tl.constexpr = (1 << (code.bits - 1)) - 1
    scale = tl.where(first > LARGEST_SCALE, LARGEST_SCALE, tl.where(first < -LARGEST_SCALE, -LARGEST_SCALE, first))
    step = tl.div_rn(scale, tl.full(scale.shape, LEVELS, tl.float32))
    return tl.minimum(less(codes, LEVELS), LEVELS * 1.0) * step


def _jitted(code: QSGD) -> Jitted:
    terms = squares if code.euclidean else None
    return Jitted(_scale, _put, _read, terms=terms, draws=not code.nearest)


CODES[QSGD] = _jitted
