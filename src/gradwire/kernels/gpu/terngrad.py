"""Minus one, zero or one, drawn so that the mean is right."""

from __future__ import annotations

import triton
import triton.language as tl

from gradwire.kernels.gpu._jitted import SMALLEST_SCALE, inverse_of, less
from gradwire.kernels.gpu._measured import Jitted
from gradwire.kernels.gpu.qsgd import uniform23
from gradwire.kernels.gpu.quantise import CODES
from gradwire.kernels.reference import terngrad
from gradwire.kernels.reference.terngrad import TernGrad

_SMALLEST_VARIANCE = tl.constexpr(terngrad.SMALLEST_VARIANCE)


@triton.jit
def _moments(code: tl.constexpr, t):
    exact = t.to(tl.float64)
    return exact, exact * exact


@triton.jit
def _scale(code: tl.constexpr, first, second, peak, negatives, numel):
    largest = peak.to(tl.float32, bitcast=True).to(tl.float64)
    if code.clip > 0:
        mean = first / numel.to(tl.float64)
        mean_square = second / numel.to(tl.float64)
        variance = mean_square - mean * mean
        varies = variance > mean_square * _SMALLEST_VARIANCE
        clipped = tl.full((1,), code.clip, tl.float64) * tl.sqrt(tl.where(varies, variance, 0.0))
        largest = tl.where(varies & (clipped < largest), clipped, largest)
    scale = tl.where(largest < SMALLEST_SCALE, 0.0, largest).to(tl.float32)
    return scale, scale


@triton.jit
def _put(code: tl.constexpr, t, first, second, random, table):
    sent = uniform23(random) < tl.abs(t) * inverse_of(first, tl.full(t.shape, 1.0, tl.float32))
    return tl.where(sent, tl.where(t < 0, 0, 2), 1)


@triton.jit
def read_digits(code: tl.constexpr, codes, first, second, table):
    return less(codes, 1) * first


CODES[TernGrad] = lambda code: Jitted(_scale, _put, read_digits, terms=_moments if code.clip else None, draws=True)
