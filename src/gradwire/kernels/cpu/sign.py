"""One bit a value."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from gradwire.kernels.cpu._compiled import (
    Float32Array,
    UInt8Array,
    array,
    compensate,
    compiled,
    keep_finite,
    negative_byte,
    rows_of_bytes,
    total_magnitude,
    total_square,
    values_and_memory,
)
from gradwire.kernels.cpu.either import sum_either
from gradwire.kernels.reference._torch import CHUNK, LANES
from gradwire.layout import Block, Int64Array


def sign_encode(
    block: Block,
    gradient: Tensor,
    residual: Tensor | None,
    beta: float,
    gamma: float,
    payload: Tensor,
    euclidean: bool = False,
) -> None:
    """See :meth:`gradwire.kernels.Kernels.sign_encode`."""
    values, memory, keep = values_and_memory(gradient, residual)
    if not keep:
        beta, gamma = 0.0, 1.0
    head = 4 * block.segment_count
    packed = array(payload)
    _encode(
        block.runs,
        block.segments,
        values,
        memory,
        keep,
        np.float32(beta),
        np.float32(gamma),
        euclidean,
        packed[:head].view(np.float32),
        packed[head:],
    )


def sign_decode(block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
    """See :meth:`gradwire.kernels.Kernels.sign_decode`."""
    head = 4 * block.segment_count
    scales = array(payloads[:, :head].contiguous()).view(np.float32)
    packed, stride = rows_of_bytes(payloads)
    sum_either(block.runs, block.segments, packed, stride, head, scales, -scales, array(out), np.float32(weight))


@compiled
def _encode(
    runs: Int64Array,
    segments: Int64Array,
    gradient: Float32Array,
    residual: Float32Array,
    keep: bool,
    beta: np.float32,
    gamma: np.float32,
    euclidean: bool,
    scales: Float32Array,
    packed: UInt8Array,
) -> None:
    t = np.empty(CHUNK, np.float32)
    lanes = np.empty(LANES, np.float64)
    packed[:] = 0
    for segment in range(scales.size):
        total, numel = 0.0, 0
        for run in range(segments[segment], segments[segment + 1]):
            start, stop = runs[run, 0], runs[run, 0] + runs[run, 1]
            g, r = gradient[start:stop], residual[start:stop]
            if euclidean:
                total += total_square(g, r, beta, gamma, lanes)
            else:
                total += total_magnitude(g, r, beta, gamma, lanes)
            numel += stop - start
        finite = np.isfinite(total)
        mean = math.sqrt(total / numel) if euclidean else total / numel
        scale = np.float32(mean) if finite else np.float32(np.nan)
        scales[segment] = scale
        for run in range(segments[segment], segments[segment + 1]):
            start, length, position = runs[run]
            for first in range(0, length, CHUNK):
                low, high = start + first, start + min(first + CHUNK, length)
                memory = residual[low:high]
                values = t[: high - low]
                compensate(gradient[low:high], memory, beta, gamma, values)
                if not finite:
                    if keep:
                        keep_finite(values, memory)
                    continue
                pack_signs(t, high - low, packed[(position + first) // 8 :])
                if keep:
                    for i in range(values.size):
                        memory[i] = values[i] - (-scale if values[i] < 0 else scale)


@compiled
def pack_signs(t: Float32Array, count: int, packed: UInt8Array) -> None:
    """Packs the first ``count`` values of ``t``, of which the size is a multiple of 8."""
    stop = -(-count // 8) * 8
    t[count:stop] = 0
    for byte in range(stop // 8):
        packed[byte] = negative_byte(t, byte * 8)
