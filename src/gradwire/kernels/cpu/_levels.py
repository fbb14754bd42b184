"""What encoders and decoders of levels share: classes, and what both sides know of the values before."""

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu._compiled import Float32Array, UInt8Array, inlined
from gradwire.kernels.reference.deadzone import LIMIT, MEMORY, ROUNDING, THRESHOLD
from gradwire.kernels.reference.deadzone_codes import CONTEXTS, QUIETEST

_HALF = 64
"""Classes, and what they differ by, are below it."""

_CLASSES = np.maximum(np.arange(2 * _HALF) - 1, 0)
_LOW_BITS = np.maximum((np.arange(_HALF) + 1 >> 1) - 1, 0)
_CONTEXTS = np.clip(np.arange(-_HALF, _HALF) - QUIETEST, 0, CONTEXTS - 1)
_POINTS = np.minimum(np.arange(_HALF), 2)
"""Looked up, since a processor cannot guess which of two numbers is the greater here."""


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
    return np.int64(_CLASSES[np.uint64((np.float64(number).view(np.int64) >> 51) - 2046)])


@inlined
def low_bits(number: np.int64) -> np.int64:
    return np.int64(_LOW_BITS[np.uint64(number)])


@inlined
def point_of(level_class: np.int64) -> np.uint64:
    """The number of the point that levels of a class have: of level 1, of 2, and of more."""
    return np.uint64(_POINTS[np.uint64(level_class)])


@inlined
def signed(magnitude: np.float32, sign: np.uint64) -> np.float32:
    """The negative if the sign is 1, and it is 0 or 1: nobody can guess which."""
    bits = np.float32(magnitude).view(np.uint32) ^ np.uint32(sign) << np.uint32(31)
    return np.uint32(bits).view(np.float32)


@inlined
def context_of(activity: np.int64) -> np.int64:
    return np.int64(_CONTEXTS[np.uint64((activity >> 6) + _HALF)])


@inlined
def following(activity: np.int64, gap_class: np.int64, level_class: np.int64) -> np.int64:
    return activity + (((level_class - gap_class) * 64 - activity) >> MEMORY)
