"""Minus one, zero or one, drawn so that the mean is right."""

from __future__ import annotations

import math

import numpy as np

from gradwire.kernels.cpu._compiled import INFINITE, Float32Array, UInt8Array, float_of, halves, hash32, inlined
from gradwire.kernels.cpu._source import numel, peak
from gradwire.kernels.cpu.quantise import CODES, Compiled, Piece, Scratch, Source, nothing_to_read, sums
from gradwire.kernels.cpu.trits import add_trits, write_trits
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


def _put(code: TernGrad, piece: Piece, scale: Float32Array, scratch: Scratch) -> None:
    low_key, high_key = halves(piece.key)
    digits = scratch.codes[piece.low : piece.high]
    _draw(scratch.t[piece.low : piece.high], piece, scale[0], low_key, high_key, digits)


@inlined
def _draw(
    t: Float32Array, piece: Piece, scale: np.float32, low_key: np.uint32, high_key: np.uint32, digits: UInt8Array
) -> None:
    """Draws one digit a value, and leaves in the residual what the digits do not stand for."""
    residual, keep = piece.memory, piece.keep
    inverse = np.float32(np.float32(1) / scale) if scale > 0 else np.float32(0)
    counter = np.uint32(piece.origin)
    for i in range(t.size):
        part = np.float32(np.int32(hash32(low_key, high_key, counter) >> np.uint32(9)))
        sent = part * np.float32(2.0**-23) + np.float32(2.0**-24) < abs(t[i]) * inverse
        digit = np.int32(sent) * (np.int32(1) - np.int32(2) * np.int32(t[i] < 0))
        digits[i] = np.uint8(digit + np.int32(1))
        if keep:
            residual[i] = t[i] - np.float32(digit) * scale
        counter = np.uint32(counter + np.uint32(1))


CODES[TernGrad] = Compiled(_measure, _put, write_trits, nothing_to_read, add_trits, terms=_moments)
