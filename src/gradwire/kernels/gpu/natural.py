"""Powers of two, drawn so that the mean is right."""

from __future__ import annotations

import triton
import triton.language as tl

from gradwire.kernels.gpu._jitted import negated
from gradwire.kernels.gpu._measured import Jitted
from gradwire.kernels.gpu.quantise import CODES
from gradwire.kernels.reference import natural
from gradwire.kernels.reference.natural import Natural

_FRACTION_BITS = tl.constexpr(natural.FRACTION_BITS)
_LARGEST_EXPONENT = tl.constexpr(natural.LARGEST_EXPONENT)
_HALF_FRACTION = tl.constexpr(1 << (natural.FRACTION_BITS - 1))
_DISTANCES = tl.constexpr(natural.DISTANCES)
_NOT_FINITE = tl.constexpr(natural.NOT_FINITE)


@triton.jit
def _scale(code: tl.constexpr, first, second, peak, negatives, numel):
    highest = tl.minimum((peak >> _FRACTION_BITS) + 1, _LARGEST_EXPONENT)
    shift = tl.maximum(highest - _DISTANCES, 0)
    if code.bits == 9:
        shift = tl.zeros((1,), tl.int32)
    unit = ((shift + 127) << _FRACTION_BITS).to(tl.float32, bitcast=True)
    return unit, unit


@triton.jit
def _put(code: tl.constexpr, t, first, second, random, table):
    shift = (first.to(tl.int32, bitcast=True) >> _FRACTION_BITS) - 127
    inverse = tl.where(shift == 127, _HALF_FRACTION, (127 - shift) << _FRACTION_BITS)
    scaled = tl.abs(t) * inverse.to(tl.float32, bitcast=True)
    field = (scaled.to(tl.int32, bitcast=True) + (random >> 9).to(tl.int32)) >> _FRACTION_BITS
    field = tl.minimum(field + shift, _LARGEST_EXPONENT) - shift
    return field | (t < 0).to(tl.int32) << (code.bits - 1)


@triton.jit
def _read(code: tl.constexpr, codes, first, second, table):
    BITS: tl.constexpr = code.bits - 1
    field = codes & ((1 << BITS) - 1)
    magnitudes = (field << _FRACTION_BITS).to(tl.float32, bitcast=True)
    if code.bits == 8:
        magnitudes = magnitudes * first
    if code.bits == 9:
        magnitudes = tl.where(field == _NOT_FINITE, float("nan"), magnitudes)
    return negated(magnitudes, codes >> BITS != 0)


CODES[Natural] = lambda code: Jitted(_scale, _put, _read, draws=True)
