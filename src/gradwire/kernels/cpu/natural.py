"""Powers of two, drawn so that the mean is right."""

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu._compiled import (
    INFINITE,
    Float32Array,
    UInt8Array,
    UInt32Array,
    compiled,
    hash32,
    inlined,
)
from gradwire.kernels.cpu._packed import read_ninth_bits, write_bytes_and_signs
from gradwire.kernels.cpu._source import peak
from gradwire.kernels.cpu._stages import CODES, Compiled, Piece, Scratch, Source, add_parts
from gradwire.kernels.reference.natural import DISTANCES, FRACTION_BITS, LARGEST_EXPONENT, Natural


def _measure(code: Natural, source: Source, scale: Float32Array, scratch: Scratch) -> bool:
    largest = peak(source)
    if code.bits == 8:
        field = int(largest >> np.uint32(FRACTION_BITS))
        scale[0] = 2.0 ** max(0, min(field + 1, LARGEST_EXPONENT) - DISTANCES)
    return bool(largest < INFINITE)


def _put(code: Natural, piece: Piece, scale: Float32Array, scratch: Scratch) -> None:
    t, fields, shift = scratch.t[piece.low : piece.high], scratch.codes[piece.low : piece.high], 0
    if code.bits == 8:
        shift = int(scale.view(np.uint32)[0] >> np.uint32(FRACTION_BITS)) - 127
    _round(t, piece, shift, fields, scratch.parts)
    if code.bits == 8:
        for i in range(t.size):
            fields[i] = np.uint8(fields[i] | np.uint8(t[i] < 0) << np.uint8(7))


def _look_up(code: Natural, codes: UInt8Array, parts: Float32Array, scratch: Scratch) -> None:
    if code.bits == 8:
        _read_bytes(codes, parts.view(np.uint32))
    else:
        _read_fields(codes, parts.view(np.uint32))


@inlined
def _round(
    t: Float32Array,
    piece: Piece,
    shift: int,
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
        random = np.uint32(hash32(piece.low_key, piece.high_key, counter) >> np.uint32(32 - FRACTION_BITS))
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


CODES[Natural] = Compiled(
    _measure, put=_put, look_up=_look_up, add=add_parts, write=write_bytes_and_signs, read=read_ninth_bits
)
