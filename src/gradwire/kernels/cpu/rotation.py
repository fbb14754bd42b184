"""Randomised Hadamard rotations in the first-level cache."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor

from gradwire.kernels.cpu._compiled import (
    Float32Array,
    UInt8Array,
    array,
    compiled,
    hash32,
    rows_of_bytes,
    total_square,
)
from gradwire.kernels.reference._torch import LANES
from gradwire.kernels.reference.rotation import LARGEST
from gradwire.kernels.reference.stochastic import SMALLEST_SCALE
from gradwire.layout import Int64Array, UInt64Array

Int32Array = np.ndarray[Any, np.dtype[np.int32]]


def rotated_scales(pieces: Int64Array, values: Tensor, scales: Tensor) -> None:
    """See :meth:`gradwire.kernels.Kernels.rotated_scales`."""
    _scales(pieces, array(values), array(scales))


def rotated_encode(
    pieces: Int64Array,
    values: Tensor,
    residual: Tensor | None,
    scales: Tensor,
    levels: Tensor,
    reach: float,
    shared: UInt64Array,
    own: UInt64Array,
    payload: Tensor,
) -> None:
    """See :meth:`gradwire.kernels.Kernels.rotated_encode`."""
    table = array(levels).astype(np.float32)
    lower = (np.searchsorted(array(levels), np.arange(int(levels[-1])), side="right") - 1).astype(np.int32)
    memory = array(values if residual is None else residual)
    _encode(
        pieces,
        array(values),
        memory,
        residual is not None,
        array(scales),
        table,
        lower,
        table[lower],
        table[lower + 1] - table[lower],
        reach,
        shared,
        own,
        array(payload),
    )


def rotated_sums(payloads: Tensor, levels: Tensor, sums: Tensor) -> None:
    """See :meth:`gradwire.kernels.Kernels.rotated_sums`."""
    if not payloads.numel():
        return
    packed, stride = rows_of_bytes(payloads)
    out, size = array(sums), payloads.shape[1]
    if sums.numel() == 2 * size:
        _sums(packed, len(payloads), stride, size, array(levels), out)
    else:
        _sums(packed, len(payloads), stride, size, array(levels), out.view(np.uint16))


def rotated_decode(
    pieces: Int64Array,
    sums: Tensor,
    count: int,
    scales: Tensor,
    levels: Tensor,
    reach: float,
    shared: UInt64Array,
    out: Tensor,
) -> None:
    """See :meth:`gradwire.kernels.Kernels.rotated_decode`."""
    positions = int(pieces[-1, 2] + pieces[-1, 3]) if len(pieces) else 0
    total = array(sums.contiguous())
    grain = int(levels[-1])
    _decode(
        pieces,
        total if sums.numel() == positions else total.view(np.uint16),
        count,
        array(scales),
        grain,
        reach,
        shared,
        array(out),
    )


@compiled
def _hadamard(source: Float32Array, target: Float32Array, size: int) -> Float32Array:
    """See ``_hadamard`` of the reference; the result lies in one of the two, and the other is scratch.

    Two stages are one pass.
    """
    stages = 0
    while size >> stages > 1:
        stages += 1
    if stages % 2:
        half = size // 2
        low, high = source[:half], source[half:size]
        for i in range(half):
            target[2 * i] = low[i] + high[i]
            target[2 * i + 1] = low[i] - high[i]
        source, target = target, source
    quarter = size // 4
    for _ in range(stages // 2):
        a, b = source[:quarter], source[quarter : 2 * quarter]
        c, d = source[2 * quarter : 3 * quarter], source[3 * quarter : size]
        for i in range(quarter):
            even, odd = a[i] + c[i], a[i] - c[i]
            even_after, odd_after = b[i] + d[i], b[i] - d[i]
            target[4 * i] = even + even_after
            target[4 * i + 1] = even - even_after
            target[4 * i + 2] = odd + odd_after
            target[4 * i + 3] = odd - odd_after
        source, target = target, source
    return source


@compiled
def _flip(values: Float32Array, size: int, counter: int, key: np.uint64) -> None:
    """Gives each value its random sign."""
    bits = values.view(np.uint32)
    low, high = np.uint32(key & np.uint64(0xFFFFFFFF)), np.uint32(key >> np.uint64(32))
    for first in range(0, size, LANES):
        signs = hash32(low, high, np.uint32(counter + first))
        if size - first >= LANES:
            for i in range(LANES):
                bits[first + i] ^= np.uint32(signs >> np.uint32(i)) << np.uint32(31)
        else:
            for i in range(size - first):
                bits[first + i] ^= np.uint32(signs >> np.uint32(i)) << np.uint32(31)


@compiled
def _scales(pieces: Int64Array, values: Float32Array, scales: Float32Array) -> None:
    lanes = np.empty(LANES, np.float64)
    for number in range(len(pieces)):
        start, length, size = pieces[number, 0], pieces[number, 1], pieces[number, 2]
        piece = values[start : start + length]
        scale = math.sqrt(total_square(piece, piece, np.float32(0), np.float32(1), lanes) / size)
        scales[number] = np.float32(scale if scale >= SMALLEST_SCALE else 0.0)


@compiled
def _encode(
    pieces: Int64Array,
    values: Float32Array,
    memory: Float32Array,
    keeps: bool,
    scales: Float32Array,
    table: Float32Array,
    lower: Int32Array,
    floors: Float32Array,
    widths: Float32Array,
    reach: float,
    shared: UInt64Array,
    own: UInt64Array,
    payload: UInt8Array,
) -> None:
    grain = lower.size
    middle = np.float32(grain / 2)
    most = 0
    for number in range(len(pieces)):
        most = max(most, pieces[number, 2])
    first_buffer, second_buffer = np.empty(most, np.float32), np.empty(most, np.float32)
    codes, uniform = np.empty(most, np.int32), np.empty(most, np.float32)
    payload[:] = 0
    for number in range(len(pieces)):
        start, length, size = pieces[number, 0], pieces[number, 1], pieces[number, 2]
        position, counter, run = pieces[number, 3], pieces[number, 4], pieces[number, 5]
        scale = scales[number]
        if not np.isfinite(scale) or scale == 0:
            continue
        for i in range(length):
            first_buffer[i] = values[start + i] / scale
        first_buffer[length:size] = 0
        _flip(first_buffer, size, counter, shared[run])
        rotated = _hadamard(first_buffer, second_buffer, size)
        low, high = np.uint32(own[run] & np.uint64(0xFFFFFFFF)), np.uint32(own[run] >> np.uint64(32))
        factor = np.float32(grain / (2 * reach * math.sqrt(size)))
        for i in range(size):
            at = rotated[i] * factor + middle
            at = max(at, np.float32(0))
            rotated[i] = min(at, np.float32(grain))
        for i in range(size):
            random = hash32(low, high, np.uint32(counter + i)) >> np.uint32(16)
            uniform[i] = np.float32(random) * np.float32(2.0**-16) + np.float32(2.0**-17)
        for i in range(size):
            cell = np.uint32(min(np.int32(rotated[i]), np.int32(grain - 1)))
            codes[i] = lower[cell] + np.int32(uniform[i] * widths[cell] < rotated[i] - floors[cell])
        packed = payload[position // 2 : (position + size) // 2]
        for i in range(packed.size):
            packed[i] = np.uint8(codes[2 * i] | (codes[2 * i + 1] << 4))
        if keeps:
            for i in range(size):
                first_buffer[i] = table[codes[i]] - middle
            sent = _hadamard(first_buffer, second_buffer, size)
            _restore(sent, size, scale, counter, shared[run], reach, grain, 1)
            kept = memory[start : start + length]
            for i in range(length):
                left = kept[i] - sent[i]
                kept[i] = left if abs(left) < np.float32(np.inf) else kept[i]


@compiled
def _restore(
    values: Float32Array,
    size: int,
    scale: np.float32,
    counter: int,
    key: np.uint64,
    reach: float,
    grain: int,
    count: int,
) -> None:
    """See ``_restored`` of the reference, after the transform."""
    factor = np.float32(scale * np.float32(2 * reach / (grain * math.sqrt(size) * count)))
    largest = np.float32(LARGEST)
    for i in range(size):
        values[i] = min(max(values[i] * factor, -largest), largest)
    _flip(values, size, counter, key)


@compiled
def _sums(packed: UInt8Array, count: int, stride: int, size: int, levels: UInt8Array, sums: UInt8Array) -> None:
    pairs = np.empty(256, np.uint32)
    for byte in range(256):
        pairs[byte] = np.uint32(levels[byte & 15]) | (np.uint32(levels[byte >> 4]) << np.uint32(16))
    for i in range(size):
        total = np.uint32(0)
        for row in range(count):
            total += pairs[packed[row * stride + i]]
        sums[2 * i] = total & np.uint32(0xFFFF)
        sums[2 * i + 1] = total >> np.uint32(16)


@compiled
def _decode(
    pieces: Int64Array,
    sums: UInt8Array,
    count: int,
    scales: Float32Array,
    grain: int,
    reach: float,
    shared: UInt64Array,
    out: Float32Array,
) -> None:
    most = 0
    for number in range(len(pieces)):
        most = max(most, pieces[number, 2])
    first_buffer, second_buffer = np.empty(most, np.float32), np.empty(most, np.float32)
    middle = np.float32(count * grain / 2)
    for number in range(len(pieces)):
        start, length, size = pieces[number, 0], pieces[number, 1], pieces[number, 2]
        position, counter, run = pieces[number, 3], pieces[number, 4], pieces[number, 5]
        scale = scales[number]
        if not np.isfinite(scale):
            out[start : start + length] = np.nan
            continue
        for i in range(size):
            first_buffer[i] = np.float32(sums[position + i]) - middle
        decoded = _hadamard(first_buffer, second_buffer, size)
        _restore(decoded, size, scale, counter, shared[run], reach, grain, count)
        for i in range(length):
            out[start + i] = decoded[i]
