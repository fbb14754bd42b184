"""Count sketches, one cache line of neighbours at a time."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gradwire.kernels.cpu._compiled import Float32Array, UInt32Array, array, compiled, hash32, mix64
from gradwire.kernels.reference.sketch import LINE
from gradwire.layout import Block, Int64Array, UInt64Array
from gradwire.randomness import run_keys


def sketch(block: Block, values: Tensor, columns: Int64Array, rows: int, key: int, table: Tensor) -> None:
    """See :meth:`gradwire.kernels.Kernels.sketch`."""
    keys = run_keys(key, block.streams)
    _sketch(block.runs, block.segments, block.origins, keys, array(values), columns, rows, array(table))


def sketch_estimates(block: Block, table: Tensor, columns: Int64Array, rows: int, key: int, out: Tensor) -> None:
    """See :meth:`gradwire.kernels.Kernels.sketch_estimates`."""
    keys = run_keys(key, block.streams)
    _estimate(block.runs, block.segments, block.origins, keys, array(table), columns, rows, array(out))


@compiled
def _row_keys(key: np.uint64, low: UInt32Array, high: UInt32Array) -> None:
    """The halves of the keys of each row's columns and signs."""
    for i in range(low.size):
        mixed = mix64(key ^ np.uint64(i))
        low[i] = np.uint32(mixed & np.uint64(0xFFFFFFFF))
        high[i] = np.uint32(mixed >> np.uint64(32))


@compiled
def _column(low: np.uint32, high: np.uint32, counter: np.uint32, width: int) -> np.int64:
    return np.int64((np.uint64(hash32(low, high, counter)) * np.uint64(width)) >> np.uint64(32))


@compiled
def _sketch(
    runs: Int64Array,
    segments: Int64Array,
    origins: Int64Array,
    keys: UInt64Array,
    values: Float32Array,
    columns: Int64Array,
    rows: int,
    table: Float32Array,
) -> None:
    bits = values.view(np.uint32)
    low, high = np.empty(2 * rows, np.uint32), np.empty(2 * rows, np.uint32)
    signed_bits = np.zeros(LINE, np.uint32)
    signed = signed_bits.view(np.float32)
    written = 0
    for segment in range(columns.size):
        width = columns[segment]
        wide = np.zeros((rows, width + LINE - 1), np.float32)
        for run in range(segments[segment], segments[segment + 1]):
            start, length = runs[run, 0], runs[run, 1]
            _row_keys(keys[run], low, high)
            for first in range(0, length, LINE):
                counter = np.uint32(origins[run] + first)
                lanes = min(LINE, length - first)
                for row in range(rows):
                    column = _column(low[2 * row], high[2 * row], counter, width)
                    signs = hash32(low[2 * row + 1], high[2 * row + 1], counter)
                    into, source = wide[row], start + first
                    if lanes == LINE:
                        for i in range(LINE):
                            signed_bits[i] = bits[source + i] ^ (np.uint32(signs >> np.uint32(i)) << np.uint32(31))
                        for i in range(LINE):
                            into[column + i] += signed[i]
                    else:
                        for i in range(lanes):
                            signed_bits[i] = bits[source + i] ^ (np.uint32(signs >> np.uint32(i)) << np.uint32(31))
                            into[column + i] += signed[i]
        for row in range(rows):
            for i in range(LINE - 1):
                wide[row, i] += wide[row, width + i]
            for i in range(width):
                table[written + i] = wide[row, i]
            written += width


@compiled
def _estimate(
    runs: Int64Array,
    segments: Int64Array,
    origins: Int64Array,
    keys: UInt64Array,
    table: Float32Array,
    columns: Int64Array,
    rows: int,
    out: Float32Array,
) -> None:
    low, high = np.empty(2 * rows, np.uint32), np.empty(2 * rows, np.uint32)
    estimate_bits = np.zeros((rows, LINE), np.uint32)
    estimates = estimate_bits.view(np.float32)
    written = 0
    for segment in range(columns.size):
        width = columns[segment]
        wide = np.empty((rows, width + LINE - 1), np.float32)
        for row in range(rows):
            for i in range(width):
                wide[row, i] = table[written + i]
            for i in range(LINE - 1):
                wide[row, width + i] = wide[row, i]
            written += width
        bits = wide.view(np.uint32)
        for run in range(segments[segment], segments[segment + 1]):
            start, length = runs[run, 0], runs[run, 1]
            _row_keys(keys[run], low, high)
            for first in range(0, length, LINE):
                counter = np.uint32(origins[run] + first)
                for row in range(rows):
                    column = _column(low[2 * row], high[2 * row], counter, width)
                    signs = hash32(low[2 * row + 1], high[2 * row + 1], counter)
                    source = bits[row]
                    for i in range(LINE):
                        estimate_bits[row, i] = source[column + i] ^ (np.uint32(signs >> np.uint32(i)) << np.uint32(31))
                for number in range(rows):
                    for row in range(number % 2, rows - 1, 2):
                        for i in range(LINE):
                            a, b = estimates[row, i], estimates[row + 1, i]
                            swap = a > b
                            estimates[row, i] = b if swap else a
                            estimates[row + 1, i] = a if swap else b
                median = estimates[rows // 2]
                for i in range(min(LINE, length - first)):
                    out[start + first + i] = median[i]
