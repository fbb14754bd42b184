"""Eight bits a value, of a table that is finer near zero."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gradwire.kernels.cpu._compiled import (
    INFINITE,
    Float32Array,
    UInt8Array,
    UInt32Array,
    add_compensated,
    array,
    compensate,
    compensation,
    compiled,
    largest_of_runs,
    rows_of_bytes,
)
from gradwire.kernels.reference._torch import CHUNK
from gradwire.kernels.reference.dynamic import magnitudes, thresholds
from gradwire.kernels.reference.stochastic import SMALLEST_SCALE
from gradwire.layout import Block, Int64Array

_CELL_BITS = 17
"""Low bits of a float32 within a cell. Cells are so narrow that at most one threshold lies in each."""


def _cells() -> tuple[int, UInt32Array]:
    """The first cell and, for it and each following one, what makes a carry into the code at the cell's threshold.

    With ``offset`` the low bits of a value in its cell, ``cells[cell] + offset >> _CELL_BITS`` is the value's code.
    """
    edges = array(thresholds()).view(np.uint32)
    first = int(edges[0] >> _CELL_BITS) - 1
    last = int(np.float32(1).view(np.uint32) >> _CELL_BITS)
    starts = np.arange(first, last + 1, dtype=np.uint32) << np.uint32(_CELL_BITS)
    codes = np.searchsorted(edges, starts).astype(np.uint32)
    cells = codes << np.uint32(_CELL_BITS)
    inside = edges[np.minimum(codes, edges.size - 1)] - starts
    split = (codes < edges.size) & (inside < 1 << _CELL_BITS)
    cells[split] += (1 << _CELL_BITS) - 1 - inside[split]
    return first, cells


_FIRST_CELL, _CELLS = _cells()
_MAGNITUDES = array(magnitudes())
_VALUES = np.concatenate((_MAGNITUDES, -_MAGNITUDES))


def dynamic_encode(
    block: Block, gradient: Tensor, residual: Tensor | None, beta: float, gamma: float, payload: Tensor
) -> None:
    """See :meth:`gradwire.kernels.Kernels.dynamic_encode`."""
    head = 4 * block.segment_count
    packed = array(payload)
    _encode(
        block.runs,
        block.segments,
        *compensation(gradient, residual, beta, gamma),
        packed[:head].view(np.float32),
        packed[head:],
        _FIRST_CELL,
        _CELLS,
        _VALUES,
    )


def dynamic_decode(block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
    """See :meth:`gradwire.kernels.Kernels.dynamic_decode`."""
    packed, stride = rows_of_bytes(payloads)
    _decode(block.runs, block.segments, packed, len(payloads), stride, array(out), np.float32(weight), _VALUES)


@compiled
def _encode(
    runs: Int64Array,
    segments: Int64Array,
    gradient: Float32Array,
    residual: Float32Array,
    keep: bool,
    beta: np.float32,
    gamma: np.float32,
    scales: Float32Array,
    codes: UInt8Array,
    first_cell: int,
    cells: UInt32Array,
    table: Float32Array,
) -> None:
    t, parts = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    codes[:] = 0
    for segment in range(scales.size):
        first_run, last_run = segments[segment], segments[segment + 1]
        largest = largest_of_runs(runs[first_run:last_run], gradient, residual, beta, gamma)
        if largest >= INFINITE:
            scales[segment] = np.nan
            if keep:
                add_compensated(runs[first_run:last_run], gradient, residual, beta, gamma)
            continue
        scale = np.uint32(largest).view(np.float32)
        if scale < SMALLEST_SCALE:
            scale = np.float32(0)
        scales[segment] = scale
        inverse = np.float32(np.float32(1) / scale) if scale > 0 else np.float32(0)
        for run in range(first_run, last_run):
            start, length, position = runs[run]
            for first in range(0, length, CHUNK):
                low, high = start + first, start + min(first + CHUNK, length)
                memory, values = residual[low:high], t[: high - low]
                compensate(gradient[low:high], memory, beta, gamma, values)
                for i in range(values.size):
                    parts[i] = abs(values[i]) * inverse
                piece = codes[position + first : position + first + high - low]
                _find(values, parts, first_cell, cells, piece)
                if keep:
                    _look_up(piece, table, parts)
                    for i in range(values.size):
                        memory[i] = values[i] - parts[i] * scale


@compiled
def _find(t: Float32Array, parts: Float32Array, first_cell: int, cells: UInt32Array, codes: UInt8Array) -> None:
    """Writes the code of the entry nearest to each part of the scale, with the sign of ``t``."""
    words = parts.view(np.uint32)
    low_bits, first, last = np.uint32((1 << _CELL_BITS) - 1), np.int32(first_cell), np.int32(cells.size - 1)
    cell = np.empty(t.size, np.uint32)
    for i in range(t.size):
        cell[i] = min(max(np.int32(words[i] >> np.uint32(_CELL_BITS)) - first, np.int32(0)), last)
    for i in range(t.size):
        cell[i] = cells[cell[i]]
    for i in range(t.size):
        code = np.uint32(np.uint32(cell[i] + np.uint32(words[i] & low_bits)) >> np.uint32(_CELL_BITS))
        codes[i] = np.uint8(code | np.uint32(t[i] < 0) << np.uint32(7))


@compiled
def _look_up(codes: UInt8Array, table: Float32Array, values: Float32Array) -> None:
    """Reads table entries, and does nothing else: that is as fast as it gets."""
    for i in range(codes.size):
        values[i] = table[codes[i]]


@compiled
def _decode(
    runs: Int64Array,
    segments: Int64Array,
    payloads: UInt8Array,
    rows: int,
    stride: int,
    out: Float32Array,
    weight: np.float32,
    table: Float32Array,
) -> None:
    scales = payloads.view(np.float32)
    head = 4 * (segments.size - 1)
    total, values = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    for segment in range(segments.size - 1):
        for run in range(segments[segment], segments[segment + 1]):
            start, length, position = runs[run]
            for first in range(0, length, CHUNK):
                count = min(CHUNK, length - first)
                total[:] = -0.0  # to which adding a row gives that row, whichever its sign of zero
                for row in range(rows):
                    base = row * stride + head + position + first
                    codes = payloads[base : base + count]
                    scale = scales[row * stride // 4 + segment]
                    _look_up(codes, table, values)
                    for i in range(count):
                        total[i] += values[i] * scale
                piece = out[start + first : start + first + count]
                for i in range(count):
                    piece[i] = total[i] * weight
