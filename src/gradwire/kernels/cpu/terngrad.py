"""Minus one, zero or one, drawn so that the mean is right."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gradwire.kernels.cpu._compiled import INFINITE, Float32Array, float_of
from gradwire.kernels.cpu._source import numel, peak
from gradwire.kernels.cpu._stages import CODES, DIGITS, Compiled, Scratch, Source, inverse_and_scale, sums
from gradwire.kernels.reference._torch import SMALLEST_SCALE
from gradwire.kernels.reference.terngrad import SMALLEST_VARIANCE, TernGrad


def _measure(code: TernGrad, source: Source, scale: Float32Array, scratch: Scratch) -> bool:
    bits = peak(source)
    largest = float(np.float64(float_of(bits)))
    if code.clip and bits < INFINITE:
        first, second, _ = sums(code, source, scratch)
        mean, mean_square = first / numel(source), second / numel(source)
        variance = mean_square - mean * mean
        if variance > SMALLEST_VARIANCE * mean_square:
            largest = min(largest, code.clip * math.sqrt(variance))
    scale[0] = 0.0 if largest < SMALLEST_SCALE else largest
    return bool(bits < INFINITE)


def _moments(code: TernGrad, t: np.float32) -> tuple[np.float64, np.float64]:
    exact = np.float64(t)
    return exact, exact * exact


def _number(code: TernGrad, t: np.float32, one: np.float32, other: np.float32, random: np.uint32) -> np.int32:
    part = np.float32(np.int32(random >> np.uint32(9))) * np.float32(2.0**-23) + np.float32(2.0**-24)
    digit = np.int32(part < abs(t) * one) * (np.int32(1) - np.int32(2) * np.int32(t < 0))
    return np.int32(digit + np.int32(1))


def value_of_digit(code: Any, number: np.int32, one: np.float32, other: np.float32) -> np.float32:
    return np.float32(other if number > 1 else -other if number < 1 else np.float32(0))


CODES[TernGrad] = Compiled(_measure, _number, value_of_digit, inverse_and_scale, terms=_moments, **DIGITS)
