"""Levels at powers of two, drawn so that the mean is right."""

from __future__ import annotations

import math

import numpy as np

from gradwire.kernels.cpu._compiled import INFINITE, Float32Array, UInt8Array, halves, hash32
from gradwire.kernels.cpu._packed import pack, unpack
from gradwire.kernels.cpu.qsgd import total_of_squares
from gradwire.kernels.cpu.quantise import CODES, Compiled, Piece, Scratch, Source, add_parts, peak
from gradwire.kernels.reference._torch import LARGEST_SCALE, SMALLEST_SCALE
from gradwire.kernels.reference.nuqsgd import NUQSGD


def _measure(code: NUQSGD, source: Source, scale: Float32Array, scratch: Scratch) -> bool:
    norm = math.sqrt(total_of_squares(source, scratch.lanes[0]))
    scale[0] = min(norm, LARGEST_SCALE) if norm >= SMALLEST_SCALE else 0.0
    return bool(peak(source) < INFINITE)


def _put(code: NUQSGD, piece: Piece, scale: Float32Array, scratch: Scratch) -> None:
    t, codes, one, top = scratch.t[piece.low : piece.high], scratch.codes, scale[0], (1 << (code.bits - 1)) - 1
    inverse, smallest = np.float32(np.float32(1) / one) if one > 0 else np.float32(0), np.float32(2.0 ** (1 - top))
    low_key, high_key = halves(piece.key)
    for i in range(t.size):
        random = hash32(low_key, high_key, np.uint32(piece.origin + i)) >> np.uint32(9)
        x = np.float32(abs(t[i]) * inverse)
        number = int(np.uint32(x.view(np.uint32) + random) >> np.uint32(23)) - 127 + top
        if x < smallest:
            middle = np.float32(random) * np.float32(2.0**-23) + np.float32(2.0**-24)
            number = int(middle < x * np.float32(2.0 ** (top - 1)))
        number = min(number, top)
        value = np.float32(2.0 ** (number - top)) * one if number else np.float32(0) * one
        codes[piece.low + i] = number | int(t[i] < 0) << (code.bits - 1)
        if piece.keep:
            piece.memory[i] = t[i] - (-value if t[i] < 0 else value)


def _pack(code: NUQSGD, position: int, count: int, body: UInt8Array, scratch: Scratch) -> None:
    pack(scratch.codes, count, code.bits, body[position * code.bits // 8 :])


def _read(code: NUQSGD, position: int, count: int, body: UInt8Array, scratch: Scratch) -> None:
    begin, words, top = position * code.bits // 8, scratch.parts.view(np.uint32), (1 << (code.bits - 1)) - 1
    unpack(body[begin : begin + count * code.bits // 8], code.bits, scratch.codes)
    for i in range(count):
        number = np.uint32(scratch.codes[i] & top)
        power = np.uint32(np.uint32(127 - top + number) << np.uint32(23)) if number else np.uint32(0)
        words[i] = np.uint32(
            power | np.uint32(np.uint32(scratch.codes[i]) >> np.uint32(code.bits - 1)) << np.uint32(31)
        )


def _add(
    code: NUQSGD, low: int, high: int, position: int, scale: Float32Array, body: UInt8Array, scratch: Scratch
) -> None:
    add_parts(scratch.parts[low:high], scale[0], scratch.t[low:high])


CODES[NUQSGD] = Compiled(_measure, _put, _pack, _read, _add)
