"""Minus one, zero or one, whichever is nearest."""

from __future__ import annotations

import triton
import triton.language as tl

from gradwire.kernels.gpu._measured import Jitted
from gradwire.kernels.gpu.quantise import CODES
from gradwire.kernels.gpu.terngrad import read_digits
from gradwire.kernels.reference import threelc
from gradwire.kernels.reference.threelc import ThreeLC

_LARGEST_FLOAT = tl.constexpr(threelc.LARGEST_FLOAT)


@triton.jit
def _scale(code: tl.constexpr, first, second, peak, negatives, numel):
    largest = peak.to(tl.float32, bitcast=True).to(tl.float64)
    scale = tl.full((1,), code.sparsity, tl.float64) * largest
    scale = tl.where(scale > _LARGEST_FLOAT, _LARGEST_FLOAT, scale).to(tl.float32)
    return scale, scale


@triton.jit
def _put(code: tl.constexpr, t, first, second, random, table):
    threshold = first * 0.5
    return (t > threshold).to(tl.int32) - (t < -threshold).to(tl.int32) + 1


CODES[ThreeLC] = lambda code: Jitted(_scale, _put, read_digits)
