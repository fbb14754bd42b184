"""Evenly spaced levels."""

from __future__ import annotations

import math

import numpy as np

from gradwire.kernels.cpu._compiled import Float32Array, UInt8Array, compiled, float_of, halves, hash32, inlined
from gradwire.kernels.cpu._source import peak, total
from gradwire.kernels.cpu.quantise import (
    CODES,
    Compiled,
    Piece,
    Scratch,
    Source,
    pack_codes,
    unpack_codes,
)
from gradwire.kernels.reference._torch import LARGEST_SCALE, SMALLEST_SCALE
from gradwire.kernels.reference.qsgd import QSGD


def _measure(code: QSGD, source: Source, scale: Float32Array, scratch: Scratch) -> bool:
    if code.euclidean:
        return bool(write_norm(math.sqrt(total(source, True, scratch.lanes[0])), scale))
    return bool(write_norm(np.float64(float_of(peak(source))), scale))


@inlined
def write_norm(norm: float, scale: Float32Array) -> bool:
    """A norm as a scale: 0 if too small to divide by, and no larger than can be decoded; whether it is finite."""
    scale[0] = min(norm, LARGEST_SCALE) if norm >= SMALLEST_SCALE else 0.0
    return bool(np.isfinite(norm))


def _put(code: QSGD, piece: Piece, scale: Float32Array, scratch: Scratch) -> None:
    levels, one = (1 << (code.bits - 1)) - 1, scale[0]
    t, codes = scratch.t[piece.low : piece.high], scratch.codes[piece.low : piece.high]
    inverse = np.float32(np.float32(levels) / one) if one > 0 else np.float32(0)
    low_key, high_key = halves(piece.key)
    put_levels(t, piece, codes, inverse, _step(one, levels), levels, code.nearest, low_key, high_key)


@inlined
def put_levels(
    t: Float32Array,
    piece: Piece,
    codes: UInt8Array,
    inverse: np.float32,
    step: np.float32,
    levels: int,
    nearest: bool,
    low_key: np.uint32,
    high_key: np.uint32,
) -> None:
    """Writes one code a byte, and leaves in the memory what the codes do not stand for."""
    memory, keep, counter = piece.memory, piece.keep, np.uint32(piece.origin)
    zero, half, middle = np.float32(levels), np.float32(levels + 2.0**-17), np.float32(levels + 0.5)
    highest = np.int32(2 * levels)
    for i in range(t.size):
        uniform = np.float32(hash32(low_key, high_key, counter) >> np.uint32(16))
        offset = middle if nearest else uniform * np.float32(2.0**-16) + half
        code = max(min(np.int32(t[i] * inverse + offset), highest), np.int32(0))
        codes[i] = code
        if keep:
            memory[i] = t[i] - (np.float32(code) - zero) * step
        counter = np.uint32(counter + np.uint32(1))


def _add(
    code: QSGD, low: int, high: int, position: int, scale: Float32Array, body: UInt8Array, scratch: Scratch
) -> None:
    levels = (1 << (code.bits - 1)) - 1
    add_levels(scratch.codes[low:high], _step(scale[0], levels), levels, scratch.t[low:high])


@inlined
def _step(scale: np.float32, levels: int) -> np.float32:
    """What one level is worth."""
    largest = np.float32(LARGEST_SCALE)
    return np.float32(max(min(scale, largest), -largest) / np.float32(levels))


@compiled
def add_levels(codes: UInt8Array, step: np.float32, levels: int, total: Float32Array) -> None:
    """Adds what the codes stand for."""
    zero, highest = np.float32(levels), np.uint8(2 * levels)
    for i in range(codes.size):
        total[i] += (np.float32(min(codes[i], highest)) - zero) * step


CODES[QSGD] = Compiled(_measure, _put, pack_codes, unpack_codes, _add)
