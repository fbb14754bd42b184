"""One bit a value."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gradwire.kernels.cpu._compiled import Float32Array, UInt8Array
from gradwire.kernels.cpu._packed import add_bits, pack_signs, put_bits
from gradwire.kernels.cpu._source import numel, total
from gradwire.kernels.cpu.quantise import CODES, Compiled, Piece, Scratch, Source, nothing_to_read
from gradwire.kernels.reference.sign import Sign


def _measure(code: Sign, source: Source, scale: Float32Array, scratch: Scratch) -> bool:
    mean = total(source, code.norm == 2, scratch.lanes[0]) / numel(source)
    scale[0] = math.sqrt(mean) if code.norm == 2 else mean
    return bool(np.isfinite(mean))


def _put(code: Sign, piece: Piece, scale: Float32Array, scratch: Scratch) -> None:
    t, memory, one = scratch.t[piece.low : piece.high], piece.memory, scale[0]
    if piece.keep:
        for i in range(t.size):
            memory[i] = t[i] - (-one if t[i] < 0 else one)


def write_signs(code: Any, position: int, count: int, body: UInt8Array, scratch: Scratch) -> None:
    """Packs the signs of ``t``."""
    pack_signs(scratch.t, count, body[position // 8 :])


def add_signs(
    code: Any, low: int, high: int, position: int, scale: Float32Array, body: UInt8Array, scratch: Scratch
) -> None:
    """Adds scaled signs."""
    add_bits(body[position // 8 :], scale[0], -scale[0], scratch.t[low:high])


def store_signs(
    code: Any, low: int, high: int, position: int, scale: Float32Array, body: UInt8Array, scratch: Scratch
) -> None:
    """Reads scaled signs."""
    put_bits(body[position // 8 :], scale[0], -scale[0], scratch.t[low:high])


CODES[Sign] = Compiled(_measure, _put, write_signs, nothing_to_read, add_signs, store_signs)
