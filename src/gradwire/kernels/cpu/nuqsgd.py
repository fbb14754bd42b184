"""Levels at powers of two, drawn so that the mean is right."""

from __future__ import annotations

import math

import numpy as np

from gradwire.kernels.cpu._compiled import Float32Array, UInt8Array, compiled, halves, hash32, inlined
from gradwire.kernels.cpu._packed import unpack
from gradwire.kernels.cpu._source import total
from gradwire.kernels.cpu.qsgd import write_norm
from gradwire.kernels.cpu.quantise import CODES, Compiled, Piece, Scratch, Source, add_scaled, leave_parts, pack_codes
from gradwire.kernels.reference.nuqsgd import NUQSGD


def _measure(code: NUQSGD, source: Source, scale: Float32Array, scratch: Scratch) -> bool:
    return bool(write_norm(math.sqrt(total(source, True, scratch.lanes[0])), scale))


def _put(code: NUQSGD, piece: Piece, scale: Float32Array, scratch: Scratch) -> None:
    t, parts, one = scratch.t[piece.low : piece.high], scratch.parts, scale[0]
    codes = scratch.codes[piece.low : piece.high]
    inverse = np.float32(np.float32(1) / one) if one > 0 else np.float32(0)
    for i in range(t.size):
        parts[i] = abs(t[i]) * inverse
    _draw(t, parts, piece, code.bits, codes)
    if piece.keep:
        _levels(codes, code.bits, parts)
        leave_parts(t, parts, one, piece.memory)


@inlined
def _draw(t: Float32Array, x: Float32Array, piece: Piece, bits: int, codes: UInt8Array) -> None:
    """Draws one level a value."""
    words, top, place = x.view(np.uint32), np.int32((1 << (bits - 1)) - 1), np.int32(bits - 1)
    smallest, many = np.float32(2.0 ** (1 - top)), np.float32(2.0 ** (top - 1))
    low_key, high_key = halves(piece.key)
    counter = np.uint32(piece.origin)
    for i in range(t.size):
        random = np.int32(hash32(low_key, high_key, counter) >> np.uint32(9))
        number = min(np.int32(np.uint32(words[i] + np.uint32(random)) >> np.uint32(23)) - np.int32(127) + top, top)
        one = np.float32(random) * np.float32(2.0**-23) + np.float32(2.0**-24) < x[i] * many
        number = np.int32(one) if x[i] < smallest else number
        codes[i] = np.uint8(number | np.int32(t[i] < 0) << place)
        counter = np.uint32(counter + np.uint32(1))


def _read(code: NUQSGD, position: int, count: int, body: UInt8Array, scratch: Scratch) -> None:
    begin = position * code.bits // 8
    unpack(body[begin : begin + count * code.bits // 8], code.bits, scratch.codes)
    _levels(scratch.codes[:count], code.bits, scratch.parts)


@compiled
def _levels(codes: UInt8Array, bits: int, parts: Float32Array) -> None:
    """What the codes stand for, as multiples of the scale."""
    words, top, place = parts.view(np.uint32), np.uint32((1 << (bits - 1)) - 1), np.uint32(bits - 1)
    for i in range(codes.size):
        code = np.uint32(codes[i])
        number = np.uint32(code & top)
        power = np.uint32(np.uint32(np.uint32(127) - top + number) << np.uint32(23))
        power = np.uint32(0) if number == np.uint32(0) else power
        words[i] = np.uint32(power | np.uint32(np.uint32(code >> place) << np.uint32(31)))


CODES[NUQSGD] = Compiled(_measure, _put, pack_codes, _read, add_scaled)
