"""Minus one, zero or one, whichever is nearest."""

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu._compiled import INFINITE, Float32Array, UInt8Array, compiled, float_of, inlined
from gradwire.kernels.cpu._source import peak
from gradwire.kernels.cpu.quantise import CODES, Compiled, Piece, Scratch, Source, nothing_to_read
from gradwire.kernels.cpu.trits import add_trits, write_trits
from gradwire.kernels.reference.threelc import LARGEST_FLOAT, ThreeLC


def _measure(code: ThreeLC, source: Source, scale: Float32Array, scratch: Scratch) -> bool:
    largest = peak(source)
    scale[0] = min(code.sparsity * np.float64(float_of(largest)), LARGEST_FLOAT)
    return bool(largest < INFINITE)


def _put(code: ThreeLC, piece: Piece, scale: Float32Array, scratch: Scratch) -> None:
    t, threshold = scratch.t[piece.low : piece.high], scale[0] * np.float32(0.5)
    _round(t, threshold, scratch.codes[piece.low : piece.high])
    if piece.keep:
        _leave(t, scale[0], threshold, piece.memory)


@inlined
def _round(t: Float32Array, threshold: np.float32, digits: UInt8Array) -> None:
    for i in range(digits.size):
        digits[i] = np.uint8(np.uint8(t[i] > threshold) + np.uint8(1) - np.uint8(t[i] < -threshold))


@compiled
def _leave(t: Float32Array, scale: np.float32, threshold: np.float32, memory: Float32Array) -> None:
    for i in range(memory.size):
        memory[i] = t[i] - (scale if t[i] > threshold else -scale if t[i] < -threshold else np.float32(0))


CODES[ThreeLC] = Compiled(_measure, _put, write_trits, nothing_to_read, add_trits)
