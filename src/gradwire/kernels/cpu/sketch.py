"""Count sketches, one cache line of neighbours at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from torch import Tensor

from gradwire.kernels.cpu._compiled import (
    Float32Array,
    UInt32Array,
    allocating,
    array,
    compiled,
    copy,
    halves,
    hash32,
    mix64,
)
from gradwire.kernels.cpu._instructions import element_pointer, in_all_lanes, intrinsic
from gradwire.kernels.reference.sketch import LINE, MOST_ROWS
from gradwire.layout import Block, Int64Array, UInt64Array
from gradwire.randomness import run_keys

BATCH = 64
"""Lines that are hashed together."""


def sketch(block: Block, values: Tensor, columns: Int64Array, rows: int, key: int, table: Tensor) -> None:
    keys = run_keys(key, block.streams)
    _sketch(block.runs, block.segments, block.origins, keys, array(values), columns, rows, array(table))


def sketch_estimates(block: Block, table: Tensor, columns: Int64Array, rows: int, key: int, out: Tensor) -> None:
    keys = run_keys(key, block.streams)
    _estimate(block.runs, block.segments, block.origins, keys, array(table), columns, rows, array(out))


@allocating
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
    places, signs = np.empty((rows, BATCH), np.int64), np.empty((rows, BATCH), np.uint32)
    last = np.zeros(LINE, np.float32)
    written = 0
    for segment in range(columns.size):
        width = columns[segment]
        stride = width + LINE - 1
        wide = np.zeros(rows * stride, np.float32)
        for run in range(segments[segment], segments[segment + 1]):
            start, length = runs[run, 0], runs[run, 1]
            lines = -(-length // LINE)
            for first in range(0, lines, BATCH):
                batch = min(BATCH, lines - first)
                _hash_lines(keys[run], origins[run] + LINE * first, width, places[:, :batch], signs[:, :batch])
                for line in range(batch):
                    begin = LINE * (first + line)
                    source, source_start = values, start + begin
                    if begin + LINE > length:
                        copy(values[start + begin : start + length], last)
                        last[length - begin :] = 0  # adding these changes nothing: sums begin at zero and are never -0
                        source, source_start = last, 0
                    for row in range(rows):
                        add_line(wide, row * stride + places[row, line], source, source_start, signs[row, line])
        for row in range(rows):
            of_row = wide[row * stride : (row + 1) * stride]
            for i in range(LINE - 1):
                of_row[i] += of_row[width + i]
            for i in range(width):
                table[written + i] = of_row[i]
            written += width


@allocating
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
    places, signs = np.empty((rows, BATCH), np.int64), np.empty((rows, BATCH), np.uint32)
    last = np.empty(LINE, np.float32)
    written = 0
    for segment in range(columns.size):
        width = columns[segment]
        stride = width + LINE - 1
        wide = np.empty(rows * stride, np.float32)
        for row in range(rows):
            of_row = wide[row * stride : (row + 1) * stride]
            for i in range(width):
                of_row[i] = table[written + i]
            for i in range(LINE - 1):
                of_row[width + i] = of_row[i]
            written += width
        for run in range(segments[segment], segments[segment + 1]):
            start, length = runs[run, 0], runs[run, 1]
            lines = -(-length // LINE)
            for first in range(0, lines, BATCH):
                batch = min(BATCH, lines - first)
                _hash_lines(keys[run], origins[run] + LINE * first, width, places[:, :batch], signs[:, :batch])
                for row in range(1, rows):
                    for line in range(batch):
                        places[row, line] += row * stride
                for line in range(batch):
                    begin = LINE * (first + line)
                    if begin + LINE <= length:
                        put_median(wide, places, signs, line, rows, out, start + begin)
                    else:
                        put_median(wide, places, signs, line, rows, last, 0)
                        copy(last[: length - begin], out[start + begin : start + length])


@compiled
def _hash_lines(key: np.uint64, origin: int, width: int, places: Int64Array, signs: UInt32Array) -> None:
    """First columns and sign bits of consecutive lines, the first of which has its first element at ``origin``."""
    for row in range(len(places)):
        for_column, for_sign = mix64(key ^ np.uint64(2 * row)), mix64(key ^ np.uint64(2 * row + 1))
        columns, bits = places[row], signs[row]
        low, high = halves(for_column)
        for line in range(columns.size):
            hashed = hash32(low, high, np.uint32(origin + LINE * line))
            columns[line] = np.int64((np.uint64(hashed) * np.uint64(width)) >> np.uint64(32))
        low, high = halves(for_sign)
        for line in range(bits.size):
            bits[line] = hash32(low, high, np.uint32(origin + LINE * line))


_BITS = ir.VectorType(ir.IntType(32), LINE)
_FLOATS = ir.VectorType(ir.FloatType(), LINE)
_ELEMENT_BYTES = 4


def _load(context: Any, builder: Any, array_type: Any, values: Any, index: Any, signs: Any) -> Any:
    """A line of an array, element ``i`` with its sign turned if bit ``i`` of ``signs`` is set."""
    pointer = element_pointer(context, builder, array_type, values, index, _BITS)
    loaded = builder.load(pointer, align=_ELEMENT_BYTES)
    shifted = builder.shl(in_all_lanes(builder, signs, _BITS), _BITS([31 - lane for lane in range(LINE)]))
    turned = builder.xor(loaded, builder.and_(shifted, _BITS([1 << 31] * LINE)))
    return builder.bitcast(turned, _FLOATS)


def _element(context: Any, builder: Any, array_type: Any, values: Any, row: int, column: Any) -> Any:
    """One element of a contiguous matrix."""
    matrix = context.make_array(array_type)(context, builder, values)
    stride = builder.extract_value(matrix.shape, 1)
    index = builder.add(builder.mul(stride, ir.Constant(stride.type, row)), column)
    return builder.load(builder.gep(matrix.data, [index]))


def _median(builder: Any, estimates: list[Any]) -> Any:
    """See the reference."""
    for number in range(len(estimates)):
        for i in range(number % 2, len(estimates) - 1, 2):
            low, high = estimates[i], estimates[i + 1]
            swap = builder.fcmp_ordered(">", low, high)
            estimates[i], estimates[i + 1] = builder.select(swap, high, low), builder.select(swap, low, high)
    return estimates[len(estimates) // 2]


@intrinsic
def add_line(typing_context: Any, wide: Any, column: Any, values: Any, index: Any, signs: Any) -> Any:
    """``wide[column + i] += values[index + i]`` for a line, with its sign turned if bit ``i`` of ``signs`` is set."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide, column, values, index, signs = args
        line = _load(context, builder, signature.args[2], values, index, signs)
        pointer = element_pointer(context, builder, signature.args[0], wide, column, _FLOATS)
        builder.store(builder.fadd(builder.load(pointer, align=_ELEMENT_BYTES), line), pointer, align=_ELEMENT_BYTES)
        return context.get_dummy_value()

    return types.void(wide, types.intp, values, types.intp, types.uint32), generate


@intrinsic
def put_median(
    typing_context: Any, wide: Any, places: Any, signs: Any, line: Any, rows: Any, out: Any, index: Any
) -> Any:
    """Writes to ``out[index + i]`` the median over rows of what they say of element ``i`` of a line.

    Row ``r`` says ``wide[places[r, line] + i]``, with its sign turned if bit ``i`` of ``signs[r, line]`` is set. There
    is code for each number of rows, so that the medians of a line are found in registers.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide, places, signs, line, rows, out, index = args
        for count in range(1, MOST_ROWS + 1, 2):
            with builder.if_then(builder.icmp_signed("==", rows, ir.Constant(rows.type, count))):
                estimates = []
                for row in range(count):
                    place = _element(context, builder, signature.args[1], places, row, line)
                    sign = _element(context, builder, signature.args[2], signs, row, line)
                    estimates.append(_load(context, builder, signature.args[0], wide, place, sign))
                pointer = element_pointer(context, builder, signature.args[5], out, index, _FLOATS)
                builder.store(_median(builder, estimates), pointer, align=_ELEMENT_BYTES)
        return context.get_dummy_value()

    return types.void(wide, places, signs, types.intp, types.intp, out, types.intp), generate
