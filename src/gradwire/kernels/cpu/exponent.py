"""Four bits a value: a sign, and how far its exponent lies below the largest."""

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu._compiled import INFINITE, MAGNITUDE, Float32Array, UInt8Array, compiled, float_of, inlined
from gradwire.kernels.cpu._packed import pack, unpack
from gradwire.kernels.cpu._source import peak
from gradwire.kernels.cpu.quantise import CODES, Compiled, Piece, Scratch, Source, add_scaled, leave_parts
from gradwire.kernels.reference.exponent import ZERO, Exponent

_FRACTION_BITS = np.uint32(23)


def _measure(code: Exponent, source: Source, scale: Float32Array, scratch: Scratch) -> bool:
    largest = peak(source)
    scale[0] = float_of(np.uint32(np.uint32(largest >> _FRACTION_BITS) << _FRACTION_BITS))
    return bool(largest < INFINITE)


def _put(code: Exponent, piece: Piece, scale: Float32Array, scratch: Scratch) -> None:
    t, codes, parts = scratch.t[piece.low : piece.high], scratch.codes[piece.low : piece.high], scratch.parts
    _round(t, np.int32(scale.view(np.uint32)[0] >> _FRACTION_BITS), codes)
    if piece.keep:
        _powers(codes, parts)
        leave_parts(t, parts, scale[0], piece.memory)


def _pack(code: Exponent, position: int, count: int, body: UInt8Array, scratch: Scratch) -> None:
    pack(scratch.codes, count, 4, body[position // 2 :])


def _read(code: Exponent, position: int, count: int, body: UInt8Array, scratch: Scratch) -> None:
    unpack(body[position // 2 : (position + count) // 2], 4, scratch.codes)
    _powers(scratch.codes[:count], scratch.parts)


@inlined
def _round(t: Float32Array, top: np.int32, codes: UInt8Array) -> None:
    """Writes a sign and a distance below the largest exponent for each value."""
    words = t.view(np.uint32)
    half, farthest = np.uint32(1 << 22), np.int32(ZERO)
    for i in range(t.size):
        field = np.int32(np.uint32(np.uint32(words[i] & MAGNITUDE) + half) >> _FRACTION_BITS)
        distance = max(min(np.int32(top - field), farthest), np.int32(0))
        distance = farthest if field == 0 else distance
        codes[i] = np.uint8(distance | np.int32(t[i] < 0) << np.int32(3))


@compiled
def _powers(codes: UInt8Array, parts: Float32Array) -> None:
    """What the codes stand for, as multiples of the scale."""
    words = parts.view(np.uint32)
    for i in range(codes.size):
        code = np.uint32(codes[i])
        distance = np.uint32(code & np.uint32(7))
        power = np.uint32(np.uint32(np.uint32(127) - distance) << _FRACTION_BITS)
        power = np.uint32(0) if distance == np.uint32(ZERO) else power
        words[i] = np.uint32(power | np.uint32(np.uint32(code & np.uint32(8)) << np.uint32(28)))


CODES[Exponent] = Compiled(_measure, _put, _pack, _read, add_scaled)
