"""Four bits a value: a sign, and how far its exponent lies below the largest."""

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu._compiled import INFINITE, MAGNITUDE, Float32Array, float_of
from gradwire.kernels.cpu._source import peak
from gradwire.kernels.cpu._stages import CODES, Compiled, Scratch, Source
from gradwire.kernels.reference.exponent import ZERO, Exponent

_FRACTION_BITS = np.uint32(23)


def _measure(code: Exponent, source: Source, scale: Float32Array, scratch: Scratch) -> bool:
    largest = peak(source)
    scale[0] = float_of(np.uint32(np.uint32(largest >> _FRACTION_BITS) << _FRACTION_BITS))
    return bool(largest < INFINITE)


def _number(code: Exponent, t: np.float32, one: np.float32, other: np.float32, random: np.uint32) -> np.int32:
    half, farthest = np.uint32(1 << 22), np.int32(ZERO)
    top = np.int32(np.float32(one).view(np.uint32) >> _FRACTION_BITS)
    field = np.int32(np.uint32(np.uint32(np.float32(t).view(np.uint32) & MAGNITUDE) + half) >> _FRACTION_BITS)
    distance = max(min(np.int32(top - field), farthest), np.int32(0))
    return np.int32((farthest if field == 0 else distance) | np.int32(t < 0) << np.int32(3))


def _value(code: Exponent, number: np.int32, one: np.float32, other: np.float32) -> np.float32:
    distance = np.uint32(np.uint32(number) & np.uint32(7))
    power = np.uint32(np.uint32(np.uint32(127) - distance) << _FRACTION_BITS)
    power = np.uint32(0) if distance == np.uint32(ZERO) else power
    sign = np.uint32(np.uint32(np.uint32(number) & np.uint32(8)) << np.uint32(28))
    return np.float32(float_of(np.uint32(power | sign)) * one)


CODES[Exponent] = Compiled(_measure, _number, _value)
