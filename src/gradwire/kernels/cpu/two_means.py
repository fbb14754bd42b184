"""One bit a value and the mean of either side."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gradwire.kernels.cpu._compiled import (
    Float32Array,
    Float64Array,
    UInt8Array,
    add_compensated,
    add_either,
    array,
    compensate,
    compensation,
    compiled,
    rows_of_bytes,
    sum_of_lanes,
)
from gradwire.kernels.cpu.sign import pack_signs
from gradwire.kernels.reference._torch import CHUNK, LANES
from gradwire.layout import Block, Int64Array


def two_means_encode(
    block: Block, gradient: Tensor, residual: Tensor | None, beta: float, gamma: float, payload: Tensor
) -> None:
    """See :meth:`gradwire.kernels.Kernels.two_means_encode`."""
    head = 8 * block.segment_count
    packed = array(payload)
    _encode(
        block.runs,
        block.segments,
        *compensation(gradient, residual, beta, gamma),
        packed[:head].view(np.float32),
        packed[head:],
    )


def two_means_decode(block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
    """See :meth:`gradwire.kernels.Kernels.two_means_decode`."""
    packed, stride = rows_of_bytes(payloads)
    _decode(block.runs, block.segments, packed, len(payloads), stride, array(out), np.float32(weight))


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
) -> None:
    t = np.empty(CHUNK, np.float32)
    above_lanes, below_lanes = np.empty(LANES, np.float64), np.empty(LANES, np.float64)
    packed[:] = 0
    for segment in range(segments.size - 1):
        first_run, last_run = segments[segment], segments[segment + 1]
        above, below, negatives, numel = 0.0, 0.0, 0, 0
        for run in range(first_run, last_run):
            start, length = runs[run, 0], runs[run, 1]
            above_of_run, below_of_run = 0.0, 0.0
            for first in range(0, length, CHUNK):
                low, high = start + first, start + min(first + CHUNK, length)
                compensate(gradient[low:high], residual[low:high], beta, gamma, t)
                negatives += _sides(t[: high - low], above_lanes, below_lanes)
                above_of_run += sum_of_lanes(above_lanes)
                below_of_run += sum_of_lanes(below_lanes)
            above += above_of_run
            below += below_of_run
            numel += length
        if not np.isfinite(above + below):
            means[2 * segment : 2 * segment + 2] = np.nan
            if keep:
                add_compensated(runs[first_run:last_run], gradient, residual, beta, gamma)
            continue
        high_mean = np.float32(above / max(numel - negatives, 1))
        low_mean = np.float32(below / max(negatives, 1))
        means[2 * segment], means[2 * segment + 1] = high_mean, low_mean
        for run in range(first_run, last_run):
            start, length, position = runs[run]
            for first in range(0, length, CHUNK):
                low, high = start + first, start + min(first + CHUNK, length)
                memory, values = residual[low:high], t[: high - low]
                compensate(gradient[low:high], memory, beta, gamma, values)
                pack_signs(t, high - low, packed[(position + first) // 8 :])
                if keep:
                    for i in range(values.size):
                        memory[i] = values[i] - (low_mean if values[i] < 0 else high_mean)


@compiled
def _sides(t: Float32Array, above: Float64Array, below: Float64Array) -> int:
    """Sums either side in lanes, and returns how many values are negative."""
    above[:] = 0.0
    below[:] = 0.0
    zero = np.float32(0)
    whole = t.size // LANES * LANES
    for first in range(0, whole, LANES):
        row = t[first : first + LANES]
        for i in range(LANES):
            above[i] += np.float64(zero if row[i] < 0 else row[i])
            below[i] += np.float64(row[i] if row[i] < 0 else zero)
    for i in range(t.size - whole):
        value = t[whole + i]
        above[i] += np.float64(zero if value < 0 else value)
        below[i] += np.float64(value if value < 0 else zero)
    negatives = 0
    for i in range(t.size):
        negatives += t[i] < 0
    return negatives


@compiled
def _decode(
    runs: Int64Array,
    segments: Int64Array,
    payloads: UInt8Array,
    rows: int,
    stride: int,
    out: Float32Array,
    weight: np.float32,
) -> None:
    means = payloads.view(np.float32)
    head = 8 * (segments.size - 1)
    total = np.empty(CHUNK, np.float32)
    for segment in range(segments.size - 1):
        for run in range(segments[segment], segments[segment + 1]):
            start, length, position = runs[run]
            for first in range(0, length, CHUNK):
                count = min(CHUNK, length - first)
                bytes_of_chunk = (count + 7) // 8
                total[:] = -0.0  # to which adding a row gives that row, whichever its sign of zero
                for row in range(rows):
                    base = row * stride + head + (position + first) // 8
                    packed = payloads[base : base + bytes_of_chunk]
                    high_mean = means[row * stride // 4 + 2 * segment]
                    low_mean = means[row * stride // 4 + 2 * segment + 1]
                    for byte in range(bytes_of_chunk):
                        add_either(total, 8 * byte, packed[byte], low_mean, high_mean)
                piece = out[start + first : start + first + count]
                for i in range(count):
                    piece[i] = total[i] * weight
