"""Minus one, zero or one, drawn so that the mean is right."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from gradwire.kernels.cpu._compiled import (
    INFINITE,
    Float32Array,
    Float64Array,
    UInt8Array,
    add_compensated,
    array,
    compensate,
    compensation,
    compiled,
    hash32,
    largest_of_runs,
    sum_of_lanes,
)
from gradwire.kernels.cpu.trits import put_trits
from gradwire.kernels.reference._torch import CHUNK, LANES
from gradwire.kernels.reference.stochastic import SMALLEST_SCALE
from gradwire.kernels.reference.ternary import SMALLEST_VARIANCE
from gradwire.kernels.reference.trits import trits_stride
from gradwire.layout import Block, Int64Array, UInt64Array
from gradwire.randomness import run_keys


def ternary_encode(
    block: Block,
    gradient: Tensor,
    residual: Tensor | None,
    beta: float,
    gamma: float,
    payload: Tensor,
    clip: float,
    key: int,
) -> None:
    """See :meth:`gradwire.kernels.Kernels.ternary_encode`."""
    head = 4 * block.segment_count
    packed = array(payload)
    _encode(
        block.runs,
        block.segments,
        block.origins,
        run_keys(key, block.streams),
        *compensation(gradient, residual, beta, gamma),
        packed[:head].view(np.float32),
        packed[head : head + trits_stride(block.positions)],
        float(clip),
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
    clip: float,
) -> None:
    t = np.empty(CHUNK, np.float32)
    digits = np.empty(CHUNK, np.uint8)
    packed[:] = 0
    for segment in range(scales.size):
        first_run, last_run = segments[segment], segments[segment + 1]
        scale = _scale(runs[first_run:last_run], gradient, residual, beta, gamma, clip, t)
        scales[segment] = scale
        if np.isnan(scale):
            if keep:
                add_compensated(runs[first_run:last_run], gradient, residual, beta, gamma)
            continue
        for run in range(first_run, last_run):
            start, length, position = runs[run]
            low_key = np.uint32(keys[run] & np.uint64(0xFFFFFFFF))
            high_key = np.uint32(keys[run] >> np.uint64(32))
            for first in range(0, length, CHUNK):
                low, high = start + first, start + min(first + CHUNK, length)
                memory, values = residual[low:high], t[: high - low]
                compensate(gradient[low:high], memory, beta, gamma, values)
                _draw(values, memory, keep, scale, low_key, high_key, origins[run] + first, digits)
                put_trits(packed, position + first, digits[: high - low])


@compiled
def _draw(
    t: Float32Array,
    residual: Float32Array,
    keep: bool,
    scale: np.float32,
    low_key: np.uint32,
    high_key: np.uint32,
    origin: int,
    digits: UInt8Array,
) -> None:
    """Draws one digit a value, and leaves in the residual what the digits do not stand for."""
    inverse = np.float32(np.float32(1) / scale) if scale > 0 else np.float32(0)
    counter = np.uint32(origin)
    for i in range(t.size):
        part = np.float32(np.int32(hash32(low_key, high_key, counter) >> np.uint32(9)))
        sent = part * np.float32(2.0**-23) + np.float32(2.0**-24) < abs(t[i]) * inverse
        digit = np.int32(sent) * (np.int32(1) - np.int32(2) * np.int32(t[i] < 0))
        digits[i] = np.uint8(digit + np.int32(1))
        if keep:
            residual[i] = t[i] - np.float32(digit) * scale
        counter = np.uint32(counter + np.uint32(1))


@compiled
def _scale(
    runs: Int64Array,
    gradient: Float32Array,
    residual: Float32Array,
    beta: np.float32,
    gamma: np.float32,
    clip: float,
    t: Float32Array,
) -> np.float32:
    """See ``_scale`` of the reference."""
    largest = largest_of_runs(runs, gradient, residual, beta, gamma)
    if largest >= INFINITE:
        return np.float32(np.nan)
    scale = float(np.float64(np.uint32(largest).view(np.float32)))
    if clip:
        mean, mean_square = _moments(runs, gradient, residual, beta, gamma, t)
        variance = mean_square - mean * mean
        if variance > SMALLEST_VARIANCE * mean_square:
            scale = min(scale, clip * math.sqrt(variance))
    return np.float32(0.0 if scale < SMALLEST_SCALE else scale)


@compiled
def _moments(
    runs: Int64Array,
    gradient: Float32Array,
    residual: Float32Array,
    beta: np.float32,
    gamma: np.float32,
    t: Float32Array,
) -> tuple[float, float]:
    """Means of ``t`` and of ``t * t``, summed in the order the reference defines."""
    sums, squares = np.empty(LANES, np.float64), np.empty(LANES, np.float64)
    total, square, numel = 0.0, 0.0, 0
    for run in range(len(runs)):
        start, length = runs[run, 0], runs[run, 1]
        total_of_run, square_of_run = 0.0, 0.0
        for first in range(0, length, CHUNK):
            low, high = start + first, start + min(first + CHUNK, length)
            compensate(gradient[low:high], residual[low:high], beta, gamma, t)
            _add_moments(t[: high - low], sums, squares)
            total_of_run += sum_of_lanes(sums)
            square_of_run += sum_of_lanes(squares)
        total += total_of_run
        square += square_of_run
        numel += length
    return total / numel, square / numel


@compiled
def _add_moments(t: Float32Array, sums: Float64Array, squares: Float64Array) -> None:
    """Sums of one chunk in lanes."""
    sums[:] = 0.0
    squares[:] = 0.0
    whole = t.size // LANES * LANES
    for first in range(0, whole, LANES):
        row = t[first : first + LANES]
        for i in range(LANES):
            value = np.float64(row[i])
            sums[i] += value
            squares[i] += value * value
    for i in range(t.size - whole):
        value = np.float64(t[whole + i])
        sums[i] += value
        squares[i] += value * value
