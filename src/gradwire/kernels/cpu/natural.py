"""Powers of two, drawn so that the mean is right."""

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu._compiled import (
    INFINITE,
    Float32Array,
    UInt8Array,
    UInt32Array,
    compiled,
    halves,
    hash32,
    inlined,
)
from gradwire.kernels.cpu._instructions import sign_words
from gradwire.kernels.cpu._packed import pack, pack_signs
from gradwire.kernels.cpu._source import peak
from gradwire.kernels.cpu.quantise import CODES, Compiled, Piece, Scratch, Source, add_parts
from gradwire.kernels.reference.natural import DISTANCES, FRACTION_BITS, LARGEST_EXPONENT, Natural


def _measure(code: Natural, source: Source, scale: Float32Array, scratch: Scratch) -> bool:
    largest = peak(source)
    if code.bits == 8:
        field = int(largest >> np.uint32(FRACTION_BITS))
        scale[0] = 2.0 ** max(0, min(field + 1, LARGEST_EXPONENT) - DISTANCES)
    return bool(largest < INFINITE)


def _put(code: Natural, piece: Piece, scale: Float32Array, scratch: Scratch) -> None:
    t, fields, shift = scratch.t[piece.low : piece.high], scratch.codes[piece.low : piece.high], 0
    low_key, high_key = halves(piece.key)
    if code.bits == 8:
        shift = int(scale.view(np.uint32)[0] >> np.uint32(FRACTION_BITS)) - 127
    _round(t, piece, shift, low_key, high_key, fields, scratch.parts)
    if code.bits == 8:
        for i in range(t.size):
            fields[i] = np.uint8(fields[i] | np.uint8(t[i] < 0) << np.uint8(7))


def _pack(code: Natural, position: int, count: int, body: UInt8Array, scratch: Scratch) -> None:
    pack(scratch.codes, count, 8, body[position:])
    if code.bits == 9:
        pack_signs(scratch.t, count, body[body.size // 9 * 8 + position // 8 :])


def _read(code: Natural, position: int, count: int, body: UInt8Array, scratch: Scratch) -> None:
    words = scratch.parts.view(np.uint32)
    if code.bits == 8:
        _read_bytes(body[position : position + count], words)
        return
    signs = body[body.size // 9 * 8 + position // 8 :]
    for byte in range(count // 8):
        sign_words(words, 8 * byte, signs[byte])
    _read_fields(body[position : position + count], words)


@inlined
def _round(
    t: Float32Array,
    piece: Piece,
    shift: int,
    low_key: np.uint32,
    high_key: np.uint32,
    fields: UInt8Array,
    powers: Float32Array,
) -> None:
    """Draws one exponent a value, and leaves in the residual what they do not stand for."""
    residual, keep = piece.memory, piece.keep
    scale, unit = np.float32(2.0**-shift), np.float32(2.0**shift)
    highest = np.uint32(LARGEST_EXPONENT - shift)
    counter = np.uint32(piece.origin)
    words = powers.view(np.uint32)
    for i in range(t.size):
        random = np.uint32(hash32(low_key, high_key, counter) >> np.uint32(32 - FRACTION_BITS))
        field = np.uint32(np.uint32(_bits(abs(t[i]) * scale) + random) >> np.uint32(FRACTION_BITS))
        field = min(field, highest)
        fields[i] = np.uint8(field)
        sign = np.uint32(np.uint32(t[i] < 0) << np.uint32(31))
        words[i] = np.uint32(np.uint32(field << np.uint32(FRACTION_BITS)) | sign)
        counter = np.uint32(counter + np.uint32(1))
    if keep:
        for i in range(t.size):
            residual[i] = t[i] - powers[i] * unit


@compiled
def _bits(value: np.float32) -> np.uint32:
    """The bits of a float32."""
    return np.float32(value).view(np.uint32)


def _add(
    code: Natural, low: int, high: int, position: int, scale: Float32Array, body: UInt8Array, scratch: Scratch
) -> None:
    unit = scale[0] if code.bits == 8 else np.float32(1)
    add_parts(scratch.parts[low:high], unit, scratch.t[low:high])


@compiled
def _read_bytes(codes: UInt8Array, words: UInt32Array) -> None:
    """Moves a sign and a 7-bit exponent to their places in a float32."""
    for i in range(codes.size):
        code = np.uint32(codes[i])
        sign = np.uint32(np.uint32(code & np.uint32(128)) << np.uint32(24))
        words[i] = np.uint32(np.uint32(np.uint32(code & np.uint32(127)) << np.uint32(FRACTION_BITS)) | sign)


@compiled
def _read_fields(fields: UInt8Array, words: UInt32Array) -> None:
    """Puts an exponent below each sign; the mark of what is not finite becomes NaN."""
    for i in range(fields.size):
        field = np.uint32(fields[i])
        marked = np.uint32(np.uint32(np.uint32(field + np.uint32(1)) >> np.uint32(8)) << np.uint32(FRACTION_BITS - 1))
        words[i] = np.uint32(words[i] | np.uint32(field << np.uint32(FRACTION_BITS)) | marked)


CODES[Natural] = Compiled(_measure, _put, _pack, _read, _add)
