"""Centroids of rotated values, piece by piece in the first-level cache."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from gradwire.kernels.compensated import Compensated
from gradwire.kernels.cpu._compiled import (
    Float32Array,
    UInt8Array,
    allocating,
    array,
    compiled,
    keep_finite,
)
from gradwire.kernels.cpu._source import Source, compensation, form, total_magnitude, total_square
from gradwire.kernels.cpu.rotation import _flip, _hadamard, _restore, longest, slices
from gradwire.kernels.parts import side_by_side
from gradwire.kernels.reference._torch import LANES, SMALLEST_SCALE
from gradwire.kernels.reference.rotation import LARGEST
from gradwire.layout import Int64Array, UInt64Array
from gradwire.randomness import MASK32, run_keys


def centroids_encode(
    pieces: Int64Array, source: Compensated, centroids: Tensor, keys: UInt64Array, scales: Tensor, codes: Tensor
) -> None:
    table = array(centroids)
    boundaries = (table[1:] + table[:-1]) / np.float32(2)
    values = Source(pieces, np.empty(0, np.int64), *compensation(source))
    packed, found = array(codes), array(scales)
    packed[:] = 0
    side_by_side(
        lambda some: _encode(pieces[some], values, table, boundaries, keys, found[some], packed), slices(pieces)
    )


def centroids_decode(
    pieces: Int64Array,
    scales: Tensor,
    codes: Tensor,
    centroids: Tensor,
    key: Tensor,
    streams: UInt64Array,
    out: Tensor,
    add: bool,
    weight: float,
) -> None:
    keys = run_keys(int(key) & MASK32, streams)
    given, (packed, table, target) = array(scales), map(array, (codes, centroids, out))
    side_by_side(
        lambda some: _decode(pieces[some], given[some], packed, table, keys, target, add, np.float32(weight)),
        slices(pieces),
    )


@allocating
def _encode(
    pieces: Int64Array,
    source: Source,
    centroids: Float32Array,
    boundaries: Float32Array,
    keys: UInt64Array,
    scales: Float32Array,
    packed: UInt8Array,
) -> None:
    bits = 1 if boundaries.size == 1 else 2 if boundaries.size == 3 else 4
    most = longest(pieces)
    t, rotated, products = np.empty(most, np.float32), np.empty(most, np.float32), np.empty(most, np.float32)
    codes, lanes = np.empty(most, np.uint8), np.empty((2, LANES), np.float64)
    for number in range(len(pieces)):
        start, length, size, position, counter, run = pieces[number]
        memory = source.residual[start : start + length]
        form(source, start, start + length, t)
        measured = math.sqrt(total_square(t[:length], lanes) / size)
        if not SMALLEST_SCALE <= measured < np.inf:
            scales[number] = 0.0 if np.isfinite(measured) else np.nan
            if source.keep:
                keep_finite(t[:length], memory)
            continue
        scale = np.float32(measured)
        for i in range(length):
            rotated[i] = t[i] / scale
        rotated[length:size] = 0
        _flip(rotated, size, counter, keys[run])
        _hadamard(rotated, size)
        factor = np.float32(1 / math.sqrt(size))
        for i in range(size):
            rotated[i] = rotated[i] * factor
        codes[:size] = 0
        for boundary in boundaries:
            for i in range(size):
                codes[i] += np.uint8(rotated[i] > boundary)
        for i in range(size):
            products[i] = centroids[codes[i]] * rotated[i]
        along = total_magnitude(products[:size], lanes)
        scales[number] = np.float32(min(np.float64(scale) * size / along, LARGEST))
        _pack(codes[:size], bits, packed[position * bits // 8 :])
        if source.keep:
            for i in range(size):
                rotated[i] = centroids[codes[i]]
            _hadamard(rotated, size)
            _restore(rotated, size, scales[number], counter, keys[run], 0.5, 1, 1)
            for i in range(length):
                t[i] -= rotated[i]
            keep_finite(t[:length], memory)


@compiled
def _pack(codes: UInt8Array, bits: int, packed: UInt8Array) -> None:
    """Packs a multiple of 8 codes."""
    share = 8 // bits
    for byte in range(codes.size // share):
        word = np.uint8(0)
        for i in range(share):
            word |= np.uint8(codes[byte * share + i] << np.uint8(i * bits))
        packed[byte] = word


@allocating
def _decode(
    pieces: Int64Array,
    scales: Float32Array,
    packed: UInt8Array,
    centroids: Float32Array,
    keys: UInt64Array,
    out: Float32Array,
    add: bool,
    weight: np.float32,
) -> None:
    bits = 1 if centroids.size == 2 else 2 if centroids.size == 4 else 4
    share, mask = 8 // bits, np.uint8(centroids.size - 1)
    most = longest(pieces)
    rotated = np.empty(most, np.float32)
    for number in range(len(pieces)):
        start, length, size, position, counter, run = pieces[number]
        codes = packed[position * bits // 8 : (position + size) * bits // 8]
        for byte in range(codes.size):
            for i in range(share):
                rotated[byte * share + i] = centroids[(codes[byte] >> np.uint8(i * bits)) & mask]
        _hadamard(rotated, size)
        _restore(rotated, size, scales[number], counter, keys[run], 0.5, 1, 1)
        if not np.isfinite(scales[number]):
            rotated[:length] = np.nan
        piece = out[start : start + length]
        if add:
            for i in range(length):
                piece[i] = (piece[i] + rotated[i]) * weight
        else:
            for i in range(length):
                piece[i] = rotated[i] * weight
