"""What encoders and decoders of levels share: classes, and what both sides know of the values before."""

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu._compiled import Float32Array, UInt8Array, inlined
from gradwire.kernels.reference.deadzone import LIMIT, MEMORY, ROUNDING, THRESHOLD
from gradwire.kernels.reference.deadzone_codes import CONTEXTS, QUIETEST


def offsets_of(points: UInt8Array) -> Float32Array:
    return (points.astype(np.float32) - np.float32(128)) / np.float32(256)


@inlined
def threshold_of(step: np.float32) -> np.uint32:
    """Bits of the smallest magnitude that is sent."""
    return np.float32(step * np.float32(THRESHOLD)).view(np.uint32)


@inlined
def level_of(relative: np.float32) -> np.int64:
    return np.int64(min(max(relative + np.float32(ROUNDING), np.float32(1)), np.float32(LIMIT)))


@inlined
def class_of(number: np.int64) -> np.int64:
    """The exponent and the highest bit of the mantissa of a float64, counted from 0 for 1."""
    found: np.int64 = (np.float64(number).view(np.int64) >> 51) - 2047
    return found if found > 0 else np.int64(0)


@inlined
def low_bits(number: np.int64) -> np.int64:
    bits: np.int64 = (number + 1 >> 1) - 1
    return bits if bits > 0 else np.int64(0)


@inlined
def context_of(activity: np.int64) -> np.int64:
    number: np.int64 = (activity >> 6) - QUIETEST
    return np.int64(min(number, np.int64(CONTEXTS - 1))) if number > 0 else np.int64(0)


@inlined
def following(activity: np.int64, gap_class: np.int64, level_class: np.int64) -> np.int64:
    return activity + (((level_class - gap_class) * 64 - activity) >> MEMORY)
