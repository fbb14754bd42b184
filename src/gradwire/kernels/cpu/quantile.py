"""Means of equally filled buckets."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gradwire.kernels.compensated import Compensated
from gradwire.kernels.cpu._compiled import (
    INFINITE,
    Float32Array,
    UInt8Array,
    UInt32Array,
    allocating,
    array,
    compiled,
    halves,
    hash32,
    keep_finite,
    largest_magnitude,
    mix64,
)
from gradwire.kernels.cpu._source import Source, form, of_segment, source_of, total_magnitude
from gradwire.kernels.reference._torch import LANES
from gradwire.kernels.reference.quantile import Form
from gradwire.layout import Block, Int64Array
from gradwire.randomness import MASK32

DIGIT = 11
"""Bits that a pass of the radix sort goes by."""


def quantile_encode(block: Block, source: Compensated, payload: Tensor, form: Form, key: int) -> None:
    head, before_codes, before_cells, _ = form.offsets(block)
    packed = array(payload)
    packed[:] = 0
    if form.rows:
        packed[:head].view(np.uint32)[0] = key & MASK32
    _encode(
        source_of(block, source),
        block.segment_numels,
        packed[head:before_codes].view(np.float32),
        form.means(block),
        packed[before_codes:before_cells],
        packed[before_cells:],
        form.wide(block),
        form.rows,
        form.planes,
        form.bits,
        np.uint64(key & MASK32),
    )


@allocating
def _encode(
    source: Source,
    numels: Int64Array,
    means: Float32Array,
    firsts: Int64Array,
    codes: UInt8Array,
    cells: UInt8Array,
    columns: Int64Array,
    rows: int,
    planes: int,
    bits: int,
    seed: np.uint64,
) -> None:
    longest = np.int64(0)
    for segment in range(numels.size):
        longest = max(longest, numels[segment])
    t_of_segment = np.empty(longest, np.float32)
    number_of_value, group_of_value = np.empty(longest, np.uint8), np.empty(longest, np.uint8)
    groups = 1 << planes
    edges, group_of_bucket = np.empty(groups + 1, np.int64), np.empty(1 << bits, np.uint8)
    plane_bytes = codes.size // planes
    keys, other_keys = np.empty(longest, np.uint32), np.empty(longest, np.uint32)
    order, other_order = np.empty(longest, np.uint32), np.empty(longest, np.uint32)
    before_cells = 0
    for segment in range(numels.size):
        numel, wide = numels[segment], columns[segment]
        t, bucket, group = t_of_segment[:numel], number_of_value[:numel], group_of_value[:numel]
        mine = means[firsts[segment] : firsts[segment + 1]]
        place = 0
        runs = of_segment(source, segment).runs
        for start, length, _ in runs:
            form(source, start, start + length, t[place:])
            place += length
        sketch = np.full(rows * groups * wide, (1 << bits) - 1, np.uint8)
        finite = largest_magnitude(t) < INFINITE
        if finite:
            _sort(t, keys[:numel], order[:numel], other_keys[:numel], other_order[:numel])
            share = _fill_buckets(keys[:numel], order[:numel], other_keys[:numel], other_order[:numel], mine, bucket)
            if rows:
                find_edges(share, mine.size, edges)
                for number in range(groups):
                    group_of_bucket[edges[number] : edges[number + 1]] = number
                for i in range(numel):
                    group[i] = group_of_bucket[bucket[i]]
            for row in range(rows):
                cells_of_row = sketch[row * groups * wide : (row + 1) * groups * wide]
                _insert(bucket, group, edges, wide, cells_of_row, mix64(seed + np.uint64(row)))
            for row in range(rows):
                cells_of_row = sketch[row * groups * wide : (row + 1) * groups * wide]
                _query(group, edges, wide, cells_of_row, mix64(seed + np.uint64(row)), row, bucket)
        else:
            mine[:] = np.nan
        place = 0
        for start, length, position in runs:
            end = place + length
            piece, numbers, group_numbers = t[place:end], bucket[place:end], group[place:end]
            memory = source.residual[start : start + length]
            place = end
            if not finite:
                if source.keep:
                    keep_finite(piece, memory)
                continue
            if rows:
                for plane in range(planes):
                    packed = codes[plane * plane_bytes + (position >> 3) :]
                    for i in range(length):
                        packed[i >> 3] |= np.uint8((group_numbers[i] >> np.uint8(plane) & 1) << (i & 7))
            else:
                _pack(numbers, bits, codes[position * bits // 8 :])
            if source.keep:
                for i in range(length):
                    memory[i] = piece[i] - mine[numbers[i]]
        _pack(sketch, bits, cells[before_cells:])
        before_cells += (sketch.size + 7) // 8 * bits


@allocating
def _sort(
    t: Float32Array, keys: UInt32Array, order: UInt32Array, other_keys: UInt32Array, other_order: UInt32Array
) -> None:
    """Sorts by magnitude, stably on either side of zero; the lowest bit of a key is set for negative values."""
    size = 1 << DIGIT
    counts = np.zeros((3, size), np.int64)
    mask = np.uint32(size - 1)
    for i in range(t.size):
        bits = np.float32(t[i] + np.float32(0)).view(np.uint32)
        key = np.uint32(np.uint32(bits << np.uint32(1)) | (bits >> np.uint32(31)))
        other_keys[i] = key
        other_order[i] = np.uint32(i)
        counts[0, key & mask] += 1
        counts[1, (key >> np.uint32(DIGIT)) & mask] += 1
        counts[2, key >> np.uint32(2 * DIGIT)] += 1
    for digit in range(3):
        below = 0
        for value in range(size):
            count = counts[digit, value]
            counts[digit, value] = below
            below += count
    _scatter(other_keys, other_order, keys, order, counts[0], np.uint32(0))
    _scatter(keys, order, other_keys, other_order, counts[1], np.uint32(DIGIT))
    _scatter(other_keys, other_order, keys, order, counts[2], np.uint32(2 * DIGIT))


@compiled
def _scatter(
    keys: UInt32Array,
    order: UInt32Array,
    to_keys: UInt32Array,
    to_order: UInt32Array,
    places: Int64Array,
    shift: np.uint32,
) -> None:
    mask = np.uint32((1 << DIGIT) - 1)
    for i in range(keys.size):
        digit = (keys[i] >> shift) & mask
        place = places[digit]
        places[digit] = place + 1
        to_keys[place] = keys[i]
        to_order[place] = order[i]


@allocating
def _fill_buckets(
    keys: UInt32Array,
    order: UInt32Array,
    side_bits: UInt32Array,
    side_order: UInt32Array,
    means: Float32Array,
    bucket: UInt8Array,
) -> int:
    """See ``_sort_into_buckets`` of the reference; returns how many buckets are the negative values'."""
    count, buckets = keys.size, means.size
    negative = 0
    for i in range(count):
        negative += int(keys[i] & np.uint32(1))
    low, high = 0, negative
    for i in range(count):
        below = int(keys[i] & np.uint32(1))
        place = low if below else high
        side_bits[place] = keys[i] >> np.uint32(1)
        side_order[place] = order[i]
        low += below
        high += 1 - below
    share: int = _share(negative, count, buckets)
    magnitudes = side_bits.view(np.float32)
    lanes = np.empty((2, LANES), np.float64)
    for number in range(buckets):
        base, first, size, parts = (0, 0, negative, share)
        if number >= share:
            base, first, size, parts = (share, negative, count - negative, buckets - share)
        start = first + -(-(number - base) * size // parts)
        stop = first + -(-(number - base + 1) * size // parts)
        members = magnitudes[start:stop]
        mean = total_magnitude(members, lanes) / (stop - start)
        means[number] = -mean if number < share else mean
        for i in range(start, stop):
            bucket[side_order[i]] = np.uint8(number)
    return share


@compiled
def _share(negative: int, count: int, buckets: int) -> int:
    """See ``negative_share`` of the reference."""
    if negative in (0, count):
        return buckets if negative else 0
    return min(max((2 * buckets * negative + count) // (2 * count), 1), buckets - 1)


@compiled
def find_edges(negative: int, buckets: int, edges: Int64Array) -> None:
    """See ``group_edges`` of the reference."""
    groups = edges.size - 1
    share = _share(negative, buckets, groups)
    for group in range(share):
        edges[group] = -(-group * negative // share)
    for group in range(groups - share):
        edges[share + group] = negative - (-group * (buckets - negative) // (groups - share))
    edges[groups] = buckets


@compiled
def column_of(low_key: np.uint32, high_key: np.uint32, ordinal: int, wide: int) -> np.int64:
    """Where a value is hashed to in a row of a sketch."""
    bits = np.uint64(hash32(low_key, high_key, np.uint32(ordinal)))
    return np.int64((bits * np.uint64(wide)) >> np.uint64(32))


@compiled
def _insert(
    bucket: UInt8Array, group: UInt8Array, edges: Int64Array, wide: int, cells: UInt8Array, key: np.uint64
) -> None:
    """The nearest to zero of what is hashed to a cell stays there, counted from where its group begins."""
    low_key, high_key = halves(key)
    for i in range(bucket.size):
        cell = group[i] * wide + column_of(low_key, high_key, i, wide)
        cells[cell] = min(cells[cell], np.uint8(bucket[i] - edges[group[i]]))


@compiled
def _query(
    group: UInt8Array, edges: Int64Array, wide: int, cells: UInt8Array, key: np.uint64, row: int, bucket: UInt8Array
) -> None:
    """The farthest from zero of a value's cells is its bucket."""
    low_key, high_key = halves(key)
    for i in range(bucket.size):
        found = np.uint8(edges[group[i]] + cells[group[i] * wide + column_of(low_key, high_key, i, wide)])
        bucket[i] = found if row == 0 else max(found, bucket[i])


@compiled
def _pack(codes: UInt8Array, bits: int, packed: UInt8Array) -> None:
    """Packs codes of a byte each into zeroed bytes."""
    for i in range(codes.size):
        packed[i * bits >> 3] |= np.uint8(codes[i] << (i * bits & 7))
