"""Reads what ``quantile`` writes: means by number, and numbers by sketch."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gradwire.kernels.cpu._compiled import Float32Array, UInt8Array, allocating, array, compiled, halves, mix64
from gradwire.kernels.cpu.quantile import column_of, find_edges
from gradwire.kernels.reference._torch import CHUNK
from gradwire.kernels.reference.quantile import Form
from gradwire.layout import Block, Int64Array


def quantile_decode(block: Block, payloads: Tensor, out: Tensor, weight: float, form: Form) -> None:
    head, before_codes, before_cells, _ = form.offsets(block)
    sums = array(out)
    for number, payload in enumerate(payloads):
        packed = array(payload)
        _decode(
            block.runs,
            block.segments,
            packed[head:before_codes].view(np.float32),
            form.means(block),
            packed[before_codes:before_cells],
            packed[before_cells:],
            form.wide(block),
            form.rows,
            form.planes,
            form.bits,
            np.uint64(packed[:head].view(np.uint32)[0] if form.rows else 0),
            sums,
            number == 0,
            np.float32(weight),
            number == len(payloads) - 1,
        )


@allocating
def _decode(
    runs: Int64Array,
    segments: Int64Array,
    means: Float32Array,
    firsts: Int64Array,
    codes: UInt8Array,
    cells: UInt8Array,
    columns: Int64Array,
    rows: int,
    planes: int,
    bits: int,
    seed: np.uint64,
    out: Float32Array,
    first_payload: bool,
    weight: np.float32,
    last_payload: bool,
) -> None:
    mask = np.uint8((1 << bits) - 1)
    numbers, group_numbers = np.empty(CHUNK, np.int64), np.empty(CHUNK, np.uint8)
    groups = 1 << planes
    edges = np.empty(groups + 1, np.int64)
    plane_bytes = codes.size // planes
    before_cells = 0
    for segment in range(segments.size - 1):
        wide = columns[segment]
        mine = means[firsts[segment] : firsts[segment + 1]]
        share = np.int64(0)
        for number in range(mine.size):
            share += int(np.signbit(mine[number]))
        find_edges(share, mine.size, edges)
        sketch = np.empty(rows * groups * wide, np.uint8)
        for cell in range(sketch.size):
            sketch[cell] = (cells[before_cells + (cell * bits >> 3)] >> (cell * bits & 7)) & mask
        before_cells += (sketch.size + 7) // 8 * bits
        ordinal = np.int64(0)
        for run in range(segments[segment], segments[segment + 1]):
            start, length, position = runs[run]
            for first in range(0, length, CHUNK):
                count = min(CHUNK, length - first)
                piece, found, group = out[start + first : start + first + count], numbers[:count], group_numbers[:count]
                if rows:
                    found[:] = 0
                    group[:] = 0
                    for plane in range(planes):
                        _add_plane(group, plane, codes[plane * plane_bytes + ((position + first) >> 3) :])
                    for row in range(rows):
                        key = mix64(seed + np.uint64(row))
                        _read(found, ordinal, group, wide, sketch[row * groups * wide : (row + 1) * groups * wide], key)
                    for i in range(count):
                        begin, end = edges[group[i]], edges[group[i] + 1]
                        found[i] = max(min(begin + found[i], end - 1), begin)
                else:
                    for i in range(count):
                        place = position + first + i
                        found[i] = (codes[place * bits >> 3] >> (place * bits & 7)) & mask
                for i in range(count):
                    value = mine[min(found[i], mine.size - 1)]
                    total = value if first_payload else piece[i] + value
                    piece[i] = total * weight if last_payload else total
                ordinal += count


@compiled
def _add_plane(group: UInt8Array, plane: int, bits: UInt8Array) -> None:
    """Sets one bit of each group's number."""
    for i in range(group.size):
        group[i] |= np.uint8(((bits[i >> 3] >> (i & 7)) & 1) << plane)


@compiled
def _read(found: Int64Array, ordinal: int, group: UInt8Array, wide: int, cells: UInt8Array, key: np.uint64) -> None:
    """Raises each number to what its cell has."""
    low_key, high_key = halves(key)
    for i in range(found.size):
        cell = group[i] * wide + column_of(low_key, high_key, ordinal + i, wide)
        found[i] = max(found[i], np.int64(cells[cell]))
