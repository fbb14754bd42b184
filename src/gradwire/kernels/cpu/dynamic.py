"""Eight bits a value, of a table that is finer near zero."""

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu._compiled import (
    INFINITE,
    Float32Array,
    UInt8Array,
    UInt32Array,
    array,
    compiled,
    float_of,
)
from gradwire.kernels.cpu._source import peak
from gradwire.kernels.cpu._stages import CODES, Compiled, Piece, Scratch, Source, add_parts, leave_parts
from gradwire.kernels.reference._torch import SMALLEST_SCALE
from gradwire.kernels.reference.dynamic import CELL_BITS, Dynamic, cells, magnitudes

_FIRST_CELL, _CELLS = cells()
_MAGNITUDES = array(magnitudes())
_VALUES = np.concatenate((_MAGNITUDES, -_MAGNITUDES))


def _measure(code: Dynamic, source: Source, scale: Float32Array, scratch: Scratch) -> bool:
    largest = peak(source)
    scale[0] = float_of(largest)
    if scale[0] < SMALLEST_SCALE:
        scale[0] = 0
    return bool(largest < INFINITE)


def _put(code: Dynamic, piece: Piece, scale: Float32Array, scratch: Scratch) -> None:
    t, parts, one = scratch.t[piece.low : piece.high], scratch.parts, scale[0]
    inverse = np.float32(np.float32(1) / one) if one > 0 else np.float32(0)
    for i in range(t.size):
        parts[i] = abs(t[i]) * inverse
    codes = scratch.codes[piece.low : piece.high]
    _find(t, parts, scratch.words, codes)
    if piece.keep:
        _values_of(codes, parts)
        leave_parts(t, parts, one, piece.memory)


def _look_up(code: Dynamic, codes: UInt8Array, parts: Float32Array, scratch: Scratch) -> None:
    _values_of(codes, parts)


@compiled
def _find(t: Float32Array, parts: Float32Array, cell: UInt32Array, codes: UInt8Array) -> None:
    """Writes the code of the entry nearest to each part of the scale, with the sign of ``t``."""
    words = parts.view(np.uint32)
    low_bits, first, last = np.uint32((1 << CELL_BITS) - 1), np.int32(_FIRST_CELL), np.int32(_CELLS.size - 1)
    for i in range(t.size):
        cell[i] = min(max(np.int32(words[i] >> np.uint32(CELL_BITS)) - first, np.int32(0)), last)
    for i in range(t.size):
        cell[i] = _CELLS[cell[i]]
    for i in range(t.size):
        code = np.uint32(np.uint32(cell[i] + np.uint32(words[i] & low_bits)) >> np.uint32(CELL_BITS))
        codes[i] = np.uint8(code | np.uint32(t[i] < 0) << np.uint32(7))


@compiled
def _values_of(codes: UInt8Array, values: Float32Array) -> None:
    """Reads table entries, and does nothing else: that is as fast as it gets."""
    for i in range(codes.size):
        values[i] = _VALUES[codes[i]]


CODES[Dynamic] = Compiled(_measure, put=_put, look_up=_look_up, add=add_parts)
