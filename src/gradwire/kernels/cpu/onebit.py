"""One bit a value and the mean of either side."""

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu._compiled import Float32Array, UInt8Array
from gradwire.kernels.cpu._packed import add_bits, put_bits
from gradwire.kernels.cpu._source import numel
from gradwire.kernels.cpu.quantise import CODES, Compiled, Piece, Scratch, Source, nothing_to_read, sums
from gradwire.kernels.cpu.sign import write_signs
from gradwire.kernels.reference.onebit import OneBit


def _measure(code: OneBit, source: Source, scale: Float32Array, scratch: Scratch) -> bool:
    above, below, negatives = sums(code, source, scratch)
    scale[0], scale[1] = above / max(numel(source) - negatives, 1), below / max(negatives, 1)
    return bool(np.isfinite(above + below))


def _sides(code: OneBit, t: np.float32) -> tuple[np.float64, np.float64]:
    zero = np.float32(0)
    return np.float64(zero if t < 0 else t), np.float64(t if t < 0 else zero)


def _put(code: OneBit, piece: Piece, scale: Float32Array, scratch: Scratch) -> None:
    t, memory, above, below = scratch.t[piece.low : piece.high], piece.memory, scale[0], scale[1]
    if piece.keep:
        for i in range(t.size):
            memory[i] = t[i] - (below if t[i] < 0 else above)


def _add(
    code: OneBit, low: int, high: int, position: int, scale: Float32Array, body: UInt8Array, scratch: Scratch
) -> None:
    add_bits(body[position // 8 :], scale[0], scale[1], scratch.t[low:high])


def _store(
    code: OneBit, low: int, high: int, position: int, scale: Float32Array, body: UInt8Array, scratch: Scratch
) -> None:
    put_bits(body[position // 8 :], scale[0], scale[1], scratch.t[low:high])


CODES[OneBit] = Compiled(_measure, _put, write_signs, nothing_to_read, _add, _store, _sides)
