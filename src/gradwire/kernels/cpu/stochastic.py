"""A few bits a value, rounded stochastically."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from gradwire.kernels.cpu._compiled import (
    INFINITE,
    Float32Array,
    Float64Array,
    UInt8Array,
    array,
    compensate,
    compiled,
    hash32,
    keep_finite,
    largest_magnitude,
    rows_of_bytes,
    total_square,
    values_and_memory,
)
from gradwire.kernels.cpu._packed import pack, unpack
from gradwire.kernels.reference._torch import CHUNK, LANES
from gradwire.kernels.reference.stochastic import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    stochastic_bucket_count,
)
from gradwire.layout import Block, Int64Array, UInt64Array
from gradwire.randomness import run_keys


def stochastic_encode(
    block: Block,
    gradient: Tensor,
    residual: Tensor | None,
    beta: float,
    gamma: float,
    payload: Tensor,
    bits: int,
    bucket: int,
    euclidean: bool,
    key: int,
    nearest: bool = False,
) -> None:
    """See :meth:`gradwire.kernels.Kernels.stochastic_encode`."""
    values, memory, keep = values_and_memory(gradient, residual)
    if not keep:
        beta, gamma = 0.0, 1.0
    head = 4 * stochastic_bucket_count(block, bucket)
    packed = array(payload)
    _encode(
        block.runs,
        block.segments,
        block.origins,
        run_keys(key, block.streams),
        values,
        memory,
        keep,
        np.float32(beta),
        np.float32(gamma),
        packed[:head].view(np.float32),
        packed[head:],
        bits,
        bucket,
        euclidean,
        nearest,
    )


def stochastic_decode(block: Block, payloads: Tensor, out: Tensor, weight: float, bits: int, bucket: int) -> None:
    """See :meth:`gradwire.kernels.Kernels.stochastic_decode`."""
    packed, stride = rows_of_bytes(payloads)
    head = 4 * stochastic_bucket_count(block, bucket)
    _decode(
        block.runs, block.segments, packed, len(payloads), stride, head, array(out), np.float32(weight), bits, bucket
    )


@compiled
def _encode(
    runs: Int64Array,
    segments: Int64Array,
    origins: Int64Array,
    keys: UInt64Array,
    gradient: Float32Array,
    residual: Float32Array,
    keep: bool,
    beta: np.float32,
    gamma: np.float32,
    scales: Float32Array,
    packed: UInt8Array,
    bits: int,
    bucket: int,
    euclidean: bool,
    nearest: bool,
) -> None:
    t = np.empty(CHUNK, np.float32)
    codes = np.empty(CHUNK, np.uint8)
    lanes = np.empty(LANES, np.float64)
    packed[:] = 0
    levels = (1 << (bits - 1)) - 1
    number = 0
    for segment in range(segments.size - 1):
        if not bucket:
            number = segment
            norm = 0.0
            for run in range(segments[segment], segments[segment + 1]):
                low, high = runs[run, 0], runs[run, 0] + runs[run, 1]
                norm = _grow(norm, gradient[low:high], residual[low:high], beta, gamma, t, lanes, euclidean)
            scales[number] = _scale(norm, euclidean)
        for run in range(segments[segment], segments[segment + 1]):
            start, length, position = runs[run]
            low_key = np.uint32(keys[run] & np.uint64(0xFFFFFFFF))
            high_key = np.uint32(keys[run] >> np.uint64(32))
            width = bucket if bucket else length
            for first in range(0, length, CHUNK):
                last = min(first + CHUNK, length)
                low = first
                while low < last:
                    end = min(low // width * width + width, length)
                    if bucket and low % width == 0:
                        a, b = start + low, start + end
                        norm = _grow(0.0, gradient[a:b], residual[a:b], beta, gamma, t, lanes, euclidean)
                        scales[number] = _scale(norm, euclidean)
                    high = min(end, last)
                    memory = residual[start + low : start + high]
                    values = t[: high - low]
                    compensate(gradient[start + low : start + high], memory, beta, gamma, values)
                    _quantise(
                        values,
                        memory,
                        keep,
                        codes[low - first :],
                        scales[number],
                        levels,
                        nearest,
                        low_key,
                        high_key,
                        origins[run] + low,
                    )
                    if bucket and high == end:
                        number += 1
                    low = high
                pack(codes, last - first, bits, packed[(position + first) * bits // 8 :])


@compiled
def _grow(
    norm: float,
    gradient: Float32Array,
    residual: Float32Array,
    beta: np.float32,
    gamma: np.float32,
    t: Float32Array,
    lanes: Float64Array,
    euclidean: bool,
) -> float:
    """The largest magnitude, or the sum of squares, of what ``norm`` stands for and one more run; ``t`` is scratch."""
    if euclidean:
        return norm + float(total_square(gradient, residual, beta, gamma, lanes))
    largest = np.uint32(0)
    for first in range(0, gradient.size, CHUNK):
        g, r = gradient[first : first + CHUNK], residual[first : first + CHUNK]
        values = t[: g.size]
        compensate(g, r, beta, gamma, values)
        largest = max(largest, largest_magnitude(values))
    return np.inf if largest >= INFINITE else max(norm, np.float64(np.uint32(largest).view(np.float32)))


@compiled
def _scale(norm: float, euclidean: bool) -> np.float32:
    """See ``_norm`` of the reference."""
    if not np.isfinite(norm):
        return np.float32(np.nan)
    if euclidean:
        norm = math.sqrt(norm)
    return np.float32(min(norm, LARGEST_SCALE) if norm >= SMALLEST_SCALE else 0.0)


@compiled
def _step(scale: np.float32, levels: int) -> np.float32:
    """What one level is worth."""
    largest = np.float32(LARGEST_SCALE)
    if scale > largest:
        scale = largest
    if scale < -largest:
        scale = -largest
    return np.float32(scale / np.float32(levels))


@compiled
def _quantise(
    t: Float32Array,
    residual: Float32Array,
    keep: bool,
    codes: UInt8Array,
    scale: np.float32,
    levels: int,
    nearest: bool,
    low_key: np.uint32,
    high_key: np.uint32,
    origin: int,
) -> None:
    """Writes one code a byte, and leaves in the residual what the codes do not stand for."""
    if np.isnan(scale):
        codes[: t.size] = 0
        if keep:
            keep_finite(t, residual)
        return
    step = _step(scale, levels)
    zero = np.float32(levels)
    inverse = np.float32(zero / scale) if scale > 0 else np.float32(0)
    half = np.float32(levels + 2.0**-17)
    highest = np.int32(2 * levels)
    if nearest:
        middle = np.float32(levels + 0.5)
        for i in range(t.size):
            code = min(np.int32(t[i] * inverse + middle), highest)
            codes[i] = code
            if keep:
                residual[i] = t[i] - (np.float32(code) - zero) * step
        return
    counter = np.uint32(origin)
    for i in range(t.size):
        uniform = np.float32(hash32(low_key, high_key, counter) >> np.uint32(16))
        offset = uniform * np.float32(2.0**-16) + half
        code = min(np.int32(t[i] * inverse + offset), highest)
        codes[i] = code
        if keep:
            residual[i] = t[i] - (np.float32(code) - zero) * step
        counter = np.uint32(counter + np.uint32(1))


@compiled
def _decode(
    runs: Int64Array,
    segments: Int64Array,
    payloads: UInt8Array,
    rows: int,
    stride: int,
    head: int,
    out: Float32Array,
    weight: np.float32,
    bits: int,
    bucket: int,
) -> None:
    scales = payloads.view(np.float32)
    codes = np.empty(CHUNK, np.uint8)
    total = np.empty(CHUNK, np.float32)
    levels = (1 << (bits - 1)) - 1
    number_of_run = 0
    for segment in range(segments.size - 1):
        for run in range(segments[segment], segments[segment + 1]):
            start, length, position = runs[run]
            width = bucket if bucket else length
            number_of_run = number_of_run if bucket else segment
            for first in range(0, length, CHUNK):
                last = min(first + CHUNK, length)
                total[:] = -0.0  # to which adding a row gives that row, whichever its sign of zero
                for row in range(rows):
                    base = row * stride + head + (position + first) * bits // 8
                    unpack(payloads[base : base + (last - first + 7) // 8 * bits], bits, codes)
                    low = first
                    while low < last:
                        high = min(low // width * width + width, last)
                        scale = scales[row * stride // 4 + number_of_run + low // width]
                        _add(codes[low - first : high - first], _step(scale, levels), levels, total[low - first :])
                        low = high
                piece = out[start + first : start + last]
                for i in range(piece.size):
                    piece[i] = total[i] * weight
            if bucket:
                number_of_run += -(-length // bucket)


@compiled
def _add(codes: UInt8Array, step: np.float32, levels: int, total: Float32Array) -> None:
    """Adds what the codes stand for."""
    zero, highest = np.float32(levels), np.uint8(2 * levels)
    for i in range(codes.size):
        total[i] += (np.float32(min(codes[i], highest)) - zero) * step
