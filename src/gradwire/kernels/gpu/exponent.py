"""Four bits a value: a sign, and how far its exponent lies below the largest."""

from __future__ import annotations

import triton
import triton.language as tl

from gradwire.kernels.gpu._jitted import magnitude_bits
from gradwire.kernels.gpu._measured import Jitted
from gradwire.kernels.gpu.quantise import CODES
from gradwire.kernels.reference import exponent
from gradwire.kernels.reference.exponent import Exponent

_ZERO = tl.constexpr(exponent.ZERO)


@triton.jit
def _scale(code: tl.constexpr, first, second, peak, negatives, numel):
    power = (peak >> 23 << 23).to(tl.float32, bitcast=True)
    return power, power


@triton.jit
def _put(code: tl.constexpr, t, first, second, random, table):
    field = (magnitude_bits(t) + (1 << 22)) >> 23
    distance = (first.to(tl.int32, bitcast=True) >> 23) - field
    distance = tl.where(field == 0, _ZERO, tl.minimum(tl.maximum(distance, 0), _ZERO))
    return distance | (t < 0).to(tl.int32) << 3


@triton.jit
def _read(code: tl.constexpr, codes, first, second, table):
    bits = (((codes & 7) ^ _ZERO) << 23) | ((codes >> 3) << 31)
    return bits.to(tl.float32, bitcast=True) * (2.0 ** (127 - _ZERO)) * first


CODES[Exponent] = lambda code: Jitted(_scale, _put, _read)
