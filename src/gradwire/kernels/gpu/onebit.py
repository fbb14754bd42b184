"""One bit a value and the mean of either side."""

from __future__ import annotations

import triton
import triton.language as tl

from gradwire.kernels.gpu._measured import Jitted
from gradwire.kernels.gpu.quantise import CODES
from gradwire.kernels.reference.onebit import OneBit


@triton.jit
def _sides(code: tl.constexpr, t):
    exact = t.to(tl.float64)
    return tl.where(t < 0, 0.0, exact), tl.where(t < 0, exact, 0.0)


@triton.jit
def _scale(code: tl.constexpr, first, second, peak, negatives, numel):
    others = numel - negatives
    above = first / tl.maximum(others, 1).to(tl.float64)
    below = second / tl.maximum(negatives, 1).to(tl.float64)
    return above.to(tl.float32), below.to(tl.float32)


@triton.jit
def _put(code: tl.constexpr, t, first, second, random, table):
    return (t < 0).to(tl.int32)


@triton.jit
def _read(code: tl.constexpr, codes, first, second, table):
    return tl.where(codes != 0, second, first)


CODES[OneBit] = lambda code: Jitted(_scale, _put, _read, terms=_sides)
