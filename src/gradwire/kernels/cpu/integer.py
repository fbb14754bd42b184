"""Levels of a scale that all workers share, so that codes add up."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gradwire.kernels.cpu._compiled import (
    INFINITE,
    Float32Array,
    UInt8Array,
    array,
    compensate,
    compiled,
    hash32,
    largest_magnitude,
    store_compensated,
    values_and_memory,
)
from gradwire.kernels.cpu._packed import pack, unpack
from gradwire.kernels.reference._torch import CHUNK
from gradwire.kernels.reference.stochastic import LARGEST_SCALE, SMALLEST_SCALE
from gradwire.layout import Block, Int64Array, UInt64Array
from gradwire.randomness import run_keys


def integer_scales(
    block: Block, gradient: Tensor, residual: Tensor | None, beta: float, gamma: float, bucket: int, scales: Tensor
) -> None:
    """See :meth:`gradwire.kernels.Kernels.integer_scales`."""
    values, memory, keep = values_and_memory(gradient, residual)
    if not keep:
        beta, gamma = 0.0, 1.0
    weights = np.float32(beta), np.float32(gamma)
    _scales(block.runs, block.segments, values, memory, keep, *weights, bucket, array(scales))


def integer_encode(
    block: Block, values: Tensor, subtract: bool, scales: Tensor, levels: int, bits: int, bucket: int, codes: Tensor,
    key: int,
) -> None:  # fmt: skip
    """See :meth:`gradwire.kernels.Kernels.integer_encode`."""
    keys = run_keys(key, block.streams)
    packed = array(codes)
    packed[:] = 0
    tables = block.runs, block.segments, block.origins, keys
    _encode(*tables, array(values), subtract, array(scales), levels, bits, bucket, packed)


def integer_decode(
    block: Block, scales: Tensor, codes: Tensor, out: Tensor, levels: int, bits: int, bucket: int, workers: int
) -> None:
    """See :meth:`gradwire.kernels.Kernels.integer_decode`."""
    _decode(block.runs, block.segments, array(scales), array(codes), array(out), levels, bits, bucket, workers)


@compiled
def _scales(
    runs: Int64Array,
    segments: Int64Array,
    gradient: Float32Array,
    residual: Float32Array,
    keep: bool,
    beta: np.float32,
    gamma: np.float32,
    bucket: int,
    scales: Float32Array,
) -> None:
    t = np.empty(CHUNK, np.float32)
    number = 0
    for segment in range(segments.size - 1):
        if not bucket:
            scales[segment] = 0
        for run in range(segments[segment], segments[segment + 1]):
            start, length = runs[run, 0], runs[run, 1]
            width = bucket if bucket else length
            for low in range(0, length, width):
                high = min(low + width, length)
                largest = np.uint32(0)
                for first in range(start + low, start + high, CHUNK):
                    last = min(first + CHUNK, start + high)
                    memory, values = residual[first:last], t[: last - first]
                    compensate(gradient[first:last], memory, beta, gamma, values)
                    largest = max(largest, largest_magnitude(values))
                    if keep:
                        store_compensated(values, memory)
                norm = np.float32(np.inf) if largest >= INFINITE else np.uint32(largest).view(np.float32)
                if bucket:
                    scales[number] = norm
                    number += 1
                else:
                    scales[segment] = max(scales[segment], norm)


@compiled
def _step(scale: np.float32, levels: int) -> np.float32:
    """See ``_step`` of the reference."""
    if not np.isfinite(scale):
        return np.float32(np.nan)
    if scale < np.float32(SMALLEST_SCALE):
        return np.float32(0)
    return np.float32(min(scale, np.float32(LARGEST_SCALE)) / np.float32(levels))


@compiled
def _encode(
    runs: Int64Array,
    segments: Int64Array,
    origins: Int64Array,
    keys: UInt64Array,
    values: Float32Array,
    subtract: bool,
    scales: Float32Array,
    levels: int,
    bits: int,
    bucket: int,
    packed: UInt8Array,
) -> None:
    codes = np.empty(CHUNK, np.uint8)
    before = 0
    for segment in range(segments.size - 1):
        for run in range(segments[segment], segments[segment + 1]):
            start, length, position = runs[run]
            low_key = np.uint32(keys[run] & np.uint64(0xFFFFFFFF))
            high_key = np.uint32(keys[run] >> np.uint64(32))
            width = bucket if bucket else length
            for first in range(0, length, CHUNK):
                last = min(first + CHUNK, length)
                low = first
                while low < last:
                    high = min(low // width * width + width, last)
                    scale = scales[before + low // width if bucket else segment]
                    piece = values[start + low : start + high]
                    _draw(piece, subtract, codes[low - first :], scale, levels, low_key, high_key, origins[run] + low)
                    low = high
                pack(codes, last - first, bits, packed[(position + first) * bits // 8 :])
            before += -(-length // width)


@compiled
def _draw(
    t: Float32Array,
    subtract: bool,
    codes: UInt8Array,
    scale: np.float32,
    levels: int,
    low_key: np.uint32,
    high_key: np.uint32,
    origin: int,
) -> None:
    """Writes one code a byte, and takes from ``t`` what the codes stand for."""
    step = _step(scale, levels)
    if np.isnan(step):
        codes[: t.size] = 0
        return
    zero = np.float32(levels)
    inverse = np.float32(zero / min(scale, np.float32(LARGEST_SCALE))) if step > 0 else np.float32(0)
    half = np.float32(levels + 2.0**-17)
    highest = np.int32(2 * levels)
    counter = np.uint32(origin)
    for i in range(t.size):
        uniform = np.float32(hash32(low_key, high_key, counter) >> np.uint32(16))
        offset = uniform * np.float32(2.0**-16) + half
        code = min(np.int32(t[i] * inverse + offset), highest)
        codes[i] = code
        if subtract:
            t[i] -= (np.float32(code) - zero) * step
        counter = np.uint32(counter + np.uint32(1))


@compiled
def _decode(
    runs: Int64Array,
    segments: Int64Array,
    scales: Float32Array,
    packed: UInt8Array,
    out: Float32Array,
    levels: int,
    bits: int,
    bucket: int,
    workers: int,
) -> None:
    codes = np.empty(CHUNK, np.uint8)
    zero, highest = np.float32(levels * workers), np.uint8(2 * levels * workers)
    weight = np.float32(1 / workers)
    before = 0
    for segment in range(segments.size - 1):
        for run in range(segments[segment], segments[segment + 1]):
            start, length, position = runs[run]
            width = bucket if bucket else length
            for first in range(0, length, CHUNK):
                last = min(first + CHUNK, length)
                base = (position + first) * bits // 8
                unpack(packed[base : base + (last - first + 7) // 8 * bits], bits, codes)
                low = first
                while low < last:
                    high = min(low // width * width + width, last)
                    step = _step(scales[before + low // width if bucket else segment], levels) * weight
                    piece = out[start + low : start + high]
                    for i in range(piece.size):
                        piece[i] = (np.float32(min(codes[low - first + i], highest)) - zero) * step
                    low = high
            before += -(-length // width)
