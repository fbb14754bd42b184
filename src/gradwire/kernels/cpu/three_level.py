"""Minus one, zero or one, whichever is nearest."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gradwire.kernels.cpu._compiled import (
    INFINITE,
    Float32Array,
    UInt8Array,
    add_compensated,
    array,
    compensation,
    compiled,
    largest_of_runs,
)
from gradwire.kernels.cpu.trits import put_trits
from gradwire.kernels.reference._torch import CHUNK
from gradwire.kernels.reference.three_level import LARGEST_FLOAT
from gradwire.kernels.reference.trits import trits_stride
from gradwire.layout import Block, Int64Array


def three_level_encode(
    block: Block,
    gradient: Tensor,
    residual: Tensor | None,
    beta: float,
    gamma: float,
    payload: Tensor,
    sparsity: float,
) -> None:
    """See :meth:`gradwire.kernels.Kernels.three_level_encode`."""
    head = 4 * block.segment_count
    packed = array(payload)
    _encode(
        block.runs,
        block.segments,
        *compensation(gradient, residual, beta, gamma),
        packed[:head].view(np.float32),
        packed[head : head + trits_stride(block.positions)],
        float(sparsity),
    )


@compiled
def _encode(
    runs: Int64Array,
    segments: Int64Array,
    gradient: Float32Array,
    residual: Float32Array,
    keep: bool,
    beta: np.float32,
    gamma: np.float32,
    scales: Float32Array,
    packed: UInt8Array,
    sparsity: float,
) -> None:
    digits = np.empty(CHUNK, np.uint8)
    packed[:] = 0
    for segment in range(scales.size):
        first_run, last_run = segments[segment], segments[segment + 1]
        largest = largest_of_runs(runs[first_run:last_run], gradient, residual, beta, gamma)
        if largest >= INFINITE:
            scales[segment] = np.nan
            if keep:
                add_compensated(runs[first_run:last_run], gradient, residual, beta, gamma)
            continue
        peak = np.float64(np.uint32(largest).view(np.float32))
        scale = np.float32(min(sparsity * peak, LARGEST_FLOAT))
        scales[segment] = scale
        for run in range(first_run, last_run):
            start, length, position = runs[run]
            for first in range(0, length, CHUNK):
                low, high = start + first, start + min(first + CHUNK, length)
                piece = digits[: high - low]
                if keep:
                    _round(gradient[low:high], residual[low:high], beta, gamma, scale, piece)
                else:
                    _only_round(gradient[low:high], scale, piece)
                put_trits(packed, position + first, piece)


@compiled
def _round(
    gradient: Float32Array,
    residual: Float32Array,
    beta: np.float32,
    gamma: np.float32,
    scale: np.float32,
    digits: UInt8Array,
) -> None:
    """Writes one digit a value, and leaves in the residual what the digits do not stand for."""
    threshold = scale * np.float32(0.5)
    for i in range(digits.size):
        t = beta * residual[i] + gamma * gradient[i]
        above, below = t > threshold, t < -threshold
        digits[i] = np.uint8(np.uint8(above) + np.uint8(1) - np.uint8(below))
        residual[i] = t - (scale if above else -scale if below else np.float32(0))


@compiled
def _only_round(values: Float32Array, scale: np.float32, digits: UInt8Array) -> None:
    """Writes one digit a value."""
    threshold = scale * np.float32(0.5)
    for i in range(digits.size):
        digits[i] = np.uint8(np.uint8(values[i] > threshold) + np.uint8(1) - np.uint8(values[i] < -threshold))
