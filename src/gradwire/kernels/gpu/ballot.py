"""Whole votes."""

from __future__ import annotations

import triton
import triton.language as tl

from gradwire.kernels.gpu._jitted import LARGEST_SCALE, SMALLEST_SCALE, inverse_of, less
from gradwire.kernels.gpu._measured import Jitted
from gradwire.kernels.gpu.quantise import CODES
from gradwire.kernels.reference.ballot import Ballot


@triton.jit
def _magnitude(code: tl.constexpr, t):
    exact = tl.abs(t).to(tl.float64)
    return exact, tl.zeros_like(exact)


@triton.jit
def _scale(code: tl.constexpr, first, second, peak, negatives, numel):
    one = tl.full((1,), 1.0, tl.float32)
    step = first * 0.0
    if not code.signs:
        LEVELS: tl.constexpr = (1 << (code.bits - 1)) - 1
        step = 2 * (first / numel.to(tl.float64)) / tl.full((1,), LEVELS, tl.float64)
    smaller = tl.where(step > LARGEST_SCALE, LARGEST_SCALE, step)
    return one, tl.where(step >= SMALLEST_SCALE, smaller, 0.0).to(tl.float32)


@triton.jit
def _put(code: tl.constexpr, t, first, second, random, table):
    LEVELS: tl.constexpr = (1 << (code.bits - 1)) - 1
    if code.signs:
        return tl.where(t > 0, 1, tl.where(t < 0, -1, 0)) + LEVELS
    else:
        steps = tl.abs(t) * inverse_of(second, tl.full(t.shape, 1.0, tl.float32)) + (LEVELS + 0.5)
        vote = tl.minimum(steps, 2.0 * LEVELS).to(tl.int32)
        return tl.where(t < 0, 2 * LEVELS - vote, vote)


@triton.jit
def _read(code: tl.constexpr, codes, first, second, table):
    LEVELS: tl.constexpr = (1 << (code.bits - 1)) - 1
    return tl.minimum(less(codes, LEVELS), LEVELS * 1.0) * first


CODES[Ballot] = lambda code: Jitted(_scale, _put, _read, terms=None if code.signs else _magnitude)
