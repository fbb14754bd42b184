"""Evenly spaced levels."""

from __future__ import annotations

import math

import numpy as np

from gradwire.kernels.cpu._compiled import Float32Array, float_of, inlined
from gradwire.kernels.cpu._source import peak, total
from gradwire.kernels.cpu._stages import CODES, Compiled, Scratch, Source
from gradwire.kernels.reference._torch import LARGEST_SCALE, SMALLEST_SCALE
from gradwire.kernels.reference.qsgd import QSGD


def _measure(code: QSGD, source: Source, scale: Float32Array, scratch: Scratch) -> bool:
    if code.euclidean:
        return bool(write_norm(math.sqrt(total(source, True, scratch.lanes)), scale))
    return bool(write_norm(np.float64(float_of(peak(source))), scale))


@inlined
def write_norm(norm: float, scale: Float32Array) -> bool:
    """A norm as a scale: 0 if too small to divide by, and no larger than can be decoded; whether it is finite."""
    scale[0] = min(norm, LARGEST_SCALE) if norm >= SMALLEST_SCALE else 0.0
    return bool(np.isfinite(norm))


def _units(code: QSGD, scale: Float32Array) -> tuple[np.float32, np.float32]:
    """Levels in 1, and what one is worth."""
    levels, norm, largest = np.float32((1 << (code.bits - 1)) - 1), scale[0], np.float32(LARGEST_SCALE)
    inverse = np.float32(levels / norm) if norm > 0 else np.float32(0)
    return inverse, np.float32(max(min(norm, largest), -largest) / levels)


def _number(code: QSGD, t: np.float32, one: np.float32, other: np.float32, random: np.uint32) -> np.int32:
    return np.int32(level_of(t * one, np.int32((1 << (code.bits - 1)) - 1), code.nearest, random))


@inlined
def level_of(x: np.float32, levels: np.int32, nearest: bool, random: np.uint32) -> np.int32:
    """One of the two levels around, or the nearest, counted from the lowest."""
    drawn = np.float32(random >> np.uint32(16)) * np.float32(2.0**-16) + np.float32(levels + 2.0**-17)
    offset = np.float32(levels + 0.5) if nearest else drawn
    return np.int32(max(min(np.int32(x + offset), np.int32(2 * levels)), np.int32(0)))


def _value(code: QSGD, number: np.int32, one: np.float32, other: np.float32) -> np.float32:
    return np.float32(value_of_level(number, np.int32((1 << (code.bits - 1)) - 1), other))


@inlined
def value_of_level(number: np.int32, levels: np.int32, step: np.float32) -> np.float32:
    """What a level stands for."""
    return np.float32((np.float32(min(np.int32(number), np.int32(2 * levels))) - np.float32(levels)) * step)


CODES[QSGD] = Compiled(_measure, _number, _value, _units)
