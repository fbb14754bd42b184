"""Minus one, zero or one, whichever is nearest."""

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu._compiled import INFINITE, Float32Array, float_of
from gradwire.kernels.cpu._source import peak
from gradwire.kernels.cpu._stages import CODES, DIGITS, Compiled, Scratch, Source
from gradwire.kernels.cpu.terngrad import value_of_digit
from gradwire.kernels.reference.threelc import LARGEST_FLOAT, ThreeLC


def _measure(code: ThreeLC, source: Source, scale: Float32Array, scratch: Scratch) -> bool:
    largest = peak(source)
    scale[0] = min(code.sparsity * np.float64(float_of(largest)), LARGEST_FLOAT)
    return bool(largest < INFINITE)


def _number(code: ThreeLC, t: np.float32, one: np.float32, other: np.float32, random: np.uint32) -> np.int32:
    threshold = np.float32(one * np.float32(0.5))
    return np.int32(np.int32(t > threshold) + np.int32(1) - np.int32(t < -threshold))


CODES[ThreeLC] = Compiled(_measure, _number, value_of_digit, **DIGITS)
