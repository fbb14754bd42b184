"""Signs without a scale."""

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu._compiled import INFINITE, Float32Array, compiled, hash32
from gradwire.kernels.cpu._source import peak
from gradwire.kernels.cpu._stages import CODES, SIGNS, Compiled, Piece, Scratch, Source
from gradwire.kernels.cpu.sign import value_of_sign
from gradwire.kernels.reference.vote import Vote


def _measure(code: Vote, source: Source, scale: Float32Array, scratch: Scratch) -> bool:
    scale[0] = 1
    return bool(peak(source) < INFINITE)


def _put(code: Vote, piece: Piece, scale: Float32Array, scratch: Scratch) -> None:
    t, sent, memory = scratch.t[piece.low : piece.high], scratch.parts[piece.low : piece.high], piece.memory
    _vote(t, piece.low_key, piece.high_key, piece.origin, sent)
    for i in range(t.size):
        value = t[i]
        t[i] = sent[i]
        if piece.keep:
            memory[i] = value - sent[i]


@compiled
def _vote(t: Float32Array, low_key: np.uint32, high_key: np.uint32, origin: int, sent: Float32Array) -> None:
    """Writes 1 or -1 for each value."""
    zeros = 0
    for i in range(t.size):
        sent[i] = np.float32(-1) if t[i] < 0 else np.float32(1)
        zeros += t[i] == 0
    if zeros:
        counter = np.uint32(origin)
        for i in range(t.size):
            minus = hash32(low_key, high_key, counter) >> np.uint32(31)
            if t[i] == 0:
                sent[i] = np.float32(1) - np.float32(minus) * np.float32(2)
            counter = np.uint32(counter + np.uint32(1))


CODES[Vote] = Compiled(_measure, value=value_of_sign, **SIGNS | {"put": _put})
