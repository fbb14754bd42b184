"""Whole votes."""

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu._compiled import INFINITE, Float32Array, UInt8Array
from gradwire.kernels.cpu._packed import pack, unpack
from gradwire.kernels.cpu._source import numel, peak
from gradwire.kernels.cpu.qsgd import add_levels
from gradwire.kernels.cpu.quantise import CODES, Compiled, Piece, Scratch, Source, sums
from gradwire.kernels.cpu.trits import add_digits, put_trits
from gradwire.kernels.reference._torch import LARGEST_SCALE, SMALLEST_SCALE
from gradwire.kernels.reference.ballot import Ballot


def _measure(code: Ballot, source: Source, scale: Float32Array, scratch: Scratch) -> bool:
    scale[0], scale[1] = 1, 0
    if not code.signs:
        total, _, _ = sums(code, source, scratch)
        step = 2 * (total / numel(source)) / ((1 << (code.bits - 1)) - 1)
        scale[1] = min(step, LARGEST_SCALE) if step >= SMALLEST_SCALE else 0.0
    return bool(peak(source) < INFINITE)


def _magnitude(code: Ballot, t: np.float32) -> tuple[np.float64, np.float64]:
    return np.float64(abs(t)), np.float64(0)


def _put(code: Ballot, piece: Piece, scale: Float32Array, scratch: Scratch) -> None:
    t, codes = scratch.t[piece.low : piece.high], scratch.codes[piece.low : piece.high]
    levels, memory, step, keep = (1 << (code.bits - 1)) - 1, piece.memory, scale[1], piece.keep
    inverse = np.float32(np.float32(1) / step) if step > 0 else np.float32(0)
    middle, highest = np.float32(levels + 0.5), np.float32(2 * levels)
    for i in range(t.size):
        if code.signs:
            vote = np.int32(levels) + np.int32(t[i] > 0) - np.int32(t[i] < 0)
        else:
            steps = np.int32(min(abs(t[i]) * inverse + middle, highest))
            vote = np.int32(2 * levels) - steps if t[i] < 0 else steps
        codes[i] = np.uint8(vote)
        if keep:
            memory[i] = t[i] - np.float32(vote - np.int32(levels))


def _pack(code: Ballot, position: int, count: int, body: UInt8Array, scratch: Scratch) -> None:
    if code.bits == 2:
        put_trits(body, position, scratch.codes[:count])
    else:
        pack(scratch.codes, count, code.bits, body[position * code.bits // 8 :])


def _read(code: Ballot, position: int, count: int, body: UInt8Array, scratch: Scratch) -> None:
    if code.bits != 2:
        begin = position * code.bits // 8
        unpack(body[begin : begin + count * code.bits // 8], code.bits, scratch.codes)


def _add(
    code: Ballot, low: int, high: int, position: int, scale: Float32Array, body: UInt8Array, scratch: Scratch
) -> None:
    if code.bits == 2:
        add_digits(body, position, scale[0], scratch.t[low:high])
    else:
        add_levels(scratch.codes[low:high], scale[0], (1 << (code.bits - 1)) - 1, scratch.t[low:high])


CODES[Ballot] = Compiled(_measure, _put, _pack, _read, _add, terms=_magnitude)
