"""Levels wherever they are wanted, drawn so that the mean is right."""

from __future__ import annotations

import math

import numpy as np

from gradwire.kernels.cpu._compiled import Float32Array, UInt8Array, compiled, hash32, inlined
from gradwire.kernels.cpu._source import total
from gradwire.kernels.cpu._stages import CODES, Compiled, Piece, Scratch, Source, add_parts, leave_parts
from gradwire.kernels.cpu.qsgd import write_norm
from gradwire.kernels.reference.nonuniform import NonUniform


def _measure(code: NonUniform, source: Source, scale: Float32Array, scratch: Scratch) -> bool:
    return bool(write_norm(math.sqrt(total(source, True, scratch.lanes)), scale))


def _put(code: NonUniform, piece: Piece, scale: Float32Array, scratch: Scratch) -> None:
    t, parts, one = scratch.t[piece.low : piece.high], scratch.parts, scale[0]
    codes, at = scratch.codes[piece.low : piece.high], scratch.words.view(np.float32)
    inverse = np.float32(np.float32(1) / one) if one > 0 else np.float32(0)
    for i in range(t.size):
        parts[i] = abs(t[i]) * inverse
    number, low = np.float32(-1), np.float32(0)
    for level in code.levels:
        high = np.float32(level)
        if high > low:
            _place(parts, number, low, np.float32(high - low), at[: t.size])
        number, low = np.float32(number + np.float32(1)), high
    _draw(t, at, piece, code.bits, codes)
    if piece.keep:
        for index, level in enumerate(code.levels):
            at[index] = level
        _values_of(codes, at, code.bits, parts)
        leave_parts(t, parts, one, piece.memory)


@compiled
def _place(x: Float32Array, number: np.float32, low: np.float32, width: np.float32, at: Float32Array) -> None:
    """Where values at or above a level lie, if they are below the next one."""
    for i in range(at.size):
        here = number + (x[i] - low) / width
        at[i] = here if x[i] >= low else at[i]


@inlined
def _draw(t: Float32Array, at: Float32Array, piece: Piece, bits: int, codes: UInt8Array) -> None:
    """Draws one level a value."""
    top, place = np.int32((1 << (bits - 1)) - 1), np.int32(bits - 1)
    counter = np.uint32(piece.origin)
    for i in range(t.size):
        uniform = np.float32(hash32(piece.low_key, piece.high_key, counter) >> np.uint32(16))
        number = min(np.int32(at[i] + (uniform * np.float32(2.0**-16) + np.float32(2.0**-17))), top)
        codes[i] = np.uint8(number | np.int32(t[i] < 0) << place)
        counter = np.uint32(counter + np.uint32(1))


def _look_up(code: NonUniform, codes: UInt8Array, parts: Float32Array, scratch: Scratch) -> None:
    levels = scratch.words.view(np.float32)
    for number, level in enumerate(code.levels):
        levels[number] = level
    _values_of(codes, levels, code.bits, parts)


@compiled
def _values_of(codes: UInt8Array, levels: Float32Array, bits: int, parts: Float32Array) -> None:
    """What the codes stand for, as multiples of the scale."""
    words, top, place = parts.view(np.uint32), np.uint8((1 << (bits - 1)) - 1), np.uint32(bits - 1)
    found = levels.view(np.uint32)
    for i in range(codes.size):
        words[i] = np.uint32(found[codes[i] & top] | np.uint32(np.uint32(codes[i]) >> place) << np.uint32(31))


CODES[NonUniform] = Compiled(_measure, put=_put, look_up=_look_up, add=add_parts)
