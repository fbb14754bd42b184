"""The number of the bucket that a value lies in, of buckets that hold equally many values."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gradwire.kernels.cpu._compiled import (
    INFINITE,
    MAGNITUDE,
    Float32Array,
    Float64Array,
    UInt8Array,
    add_compensated,
    array,
    compensate,
    compensation,
    compiled,
    largest_of_runs,
    rows_of_bytes,
    sum_of_lanes,
)
from gradwire.kernels.cpu._packed import pack, unpack
from gradwire.kernels.reference._torch import CHUNK, LANES
from gradwire.layout import Block, Int64Array

_RADIX_BITS = 11
"""Bits that one pass of sorting looks at: three passes for a float32."""


def quantile_encode(
    block: Block, gradient: Tensor, residual: Tensor | None, beta: float, gamma: float, payload: Tensor, bits: int
) -> None:
    """See :meth:`gradwire.kernels.Kernels.quantile_encode`."""
    head = 4 * block.segment_count * 2**bits
    packed = array(payload)
    _encode(
        block.runs,
        block.segments,
        *compensation(gradient, residual, beta, gamma),
        packed[:head].view(np.float32),
        packed[head:],
        bits,
    )


def quantile_decode(block: Block, payloads: Tensor, out: Tensor, weight: float, bits: int) -> None:
    """See :meth:`gradwire.kernels.Kernels.quantile_decode`."""
    packed, stride = rows_of_bytes(payloads)
    _decode(block.runs, block.segments, packed, len(payloads), stride, array(out), np.float32(weight), bits)


@compiled
def _encode(
    runs: Int64Array,
    segments: Int64Array,
    gradient: Float32Array,
    residual: Float32Array,
    keep: bool,
    beta: np.float32,
    gamma: np.float32,
    means: Float32Array,
    packed: UInt8Array,
    bits: int,
) -> None:
    t = np.empty(CHUNK, np.float32)
    count = 1 << bits
    packed[:] = 0
    for segment in range(segments.size - 1):
        mine = runs[segments[segment] : segments[segment + 1]]
        table = means[segment * count : (segment + 1) * count]
        if largest_of_runs(mine, gradient, residual, beta, gamma, t) >= INFINITE:
            table[:] = np.nan
            if keep:
                add_compensated(mine, gradient, residual, beta, gamma)
            continue
        values = np.empty(mine[:, 1].sum(), np.float32)
        done = 0
        for run in range(len(mine)):
            start, length = mine[run, 0], mine[run, 1]
            piece = values[done : done + length]
            compensate(gradient[start : start + length], residual[start : start + length], beta, gamma, piece)
            done += length
        codes = np.empty(values.size + 8, np.uint8)
        _sort_into_buckets(values, table, codes)
        done = 0
        for run in range(len(mine)):
            start, length, position = mine[run]
            if keep:
                memory = residual[start : start + length]
                for i in range(length):
                    memory[i] = values[done + i] - table[codes[done + i]]
            _pack_run(codes[done : done + length], bits, packed[position * bits // 8 :])
            done += length


@compiled
def _sort_into_buckets(values: Float32Array, means: Float32Array, codes: UInt8Array) -> None:
    """Writes the number of every value's bucket, and the mean of every bucket, 0 where it is empty."""
    order = _ascending(values)
    ascending = values[order]
    lanes = np.empty(LANES, np.float64)
    means[:] = 0
    first = 0
    while first < values.size:
        bucket = first * means.size // values.size
        last = first + 1
        while last < values.size and last * means.size // values.size == bucket:
            last += 1
        means[bucket] = np.float32(_total(ascending[first:last], lanes) / (last - first))
        for i in range(first, last):
            codes[order[i]] = bucket
        first = last


@compiled
def _ascending(values: Float32Array) -> Int64Array:
    """The stable ascending order, by a radix sort of the bits; both zeros are the same."""
    keys = (values + np.float32(0)).view(np.uint32)  # -0 + 0 = 0
    for i in range(keys.size):
        keys[i] ^= MAGNITUDE + np.uint32(1) if keys[i] <= MAGNITUDE else np.uint32(0xFFFFFFFF)
    order, moved = np.arange(keys.size), np.empty(keys.size, np.int64)
    counts = np.empty(1 << _RADIX_BITS, np.int64)
    low_bits = np.uint32((1 << _RADIX_BITS) - 1)
    for shift in range(0, 32, _RADIX_BITS):
        counts[:] = 0
        for i in range(keys.size):
            counts[(keys[i] >> np.uint32(shift)) & low_bits] += 1
        place = 0
        for digit in range(counts.size):
            count = counts[digit]
            counts[digit] = place
            place += count
        for i in range(keys.size):
            digit = (keys[order[i]] >> np.uint32(shift)) & low_bits
            moved[counts[digit]] = order[i]
            counts[digit] += 1
        order, moved = moved, order
    return order


@compiled
def _total(values: Float32Array, lanes: Float64Array) -> float:
    """Sum in the order the reference defines."""
    total = 0.0
    for first in range(0, values.size, CHUNK):
        chunk = values[first : first + CHUNK]
        lanes[:] = 0.0
        for i in range(chunk.size):
            lanes[i % LANES] += np.float64(chunk[i])
        total += sum_of_lanes(lanes)
    return total


@compiled
def _pack_run(codes: UInt8Array, bits: int, packed: UInt8Array) -> None:
    """Packs the codes of a run."""
    scratch = np.empty(CHUNK, np.uint8)
    for first in range(0, codes.size, CHUNK):
        count = min(CHUNK, codes.size - first)
        for i in range(count):
            scratch[i] = codes[first + i]
        pack(scratch, count, bits, packed[first * bits // 8 :])


@compiled
def _decode(
    runs: Int64Array,
    segments: Int64Array,
    payloads: UInt8Array,
    rows: int,
    stride: int,
    out: Float32Array,
    weight: np.float32,
    bits: int,
) -> None:
    means = payloads.view(np.float32)
    buckets = 1 << bits
    head = 4 * (segments.size - 1) * buckets
    codes = np.empty(CHUNK, np.uint8)
    total = np.empty(CHUNK, np.float32)
    for segment in range(segments.size - 1):
        for run in range(segments[segment], segments[segment + 1]):
            start, length, position = runs[run]
            for first in range(0, length, CHUNK):
                count = min(CHUNK, length - first)
                total[:] = -0.0  # to which adding a row gives that row, whichever its sign of zero
                for row in range(rows):
                    base = row * stride + head + (position + first) * bits // 8
                    unpack(payloads[base : base + (count + 7) // 8 * bits], bits, codes)
                    table = means[row * stride // 4 + segment * buckets :][:buckets]
                    for i in range(count):
                        total[i] += table[codes[i]]
                piece = out[start + first : start + first + count]
                for i in range(count):
                    piece[i] = total[i] * weight
