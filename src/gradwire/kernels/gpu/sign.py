"""One bit a value."""

from __future__ import annotations

import triton
import triton.language as tl

from gradwire.kernels.gpu._measured import Jitted
from gradwire.kernels.gpu.quantise import CODES
from gradwire.kernels.reference.sign import Sign


@triton.jit
def magnitudes_or_squares(code: tl.constexpr, t):
    exact = t.to(tl.float64)
    first = tl.abs(exact)
    if code.norm == 2:
        first = exact * exact
    return first, tl.zeros_like(exact)


@triton.jit
def _scale(code: tl.constexpr, first, second, peak, negatives, numel):
    mean = first / numel.to(tl.float64)
    if code.norm == 2:
        mean = tl.sqrt(mean)
    scale = mean.to(tl.float32)
    return scale, scale


@triton.jit
def _put(code: tl.constexpr, t, first, second, random, table):
    return (t < 0).to(tl.int32)


@triton.jit
def read_signs(code: tl.constexpr, codes, first, second, table):
    return (first.to(tl.int32, bitcast=True) ^ (codes << 31)).to(tl.float32, bitcast=True)


CODES[Sign] = lambda code: Jitted(_scale, _put, read_signs, terms=magnitudes_or_squares)
