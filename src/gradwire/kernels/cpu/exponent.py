"""Four bits a value: a sign, and how far its exponent lies below the largest."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gradwire.kernels.cpu._compiled import (
    INFINITE,
    MAGNITUDE,
    Float32Array,
    UInt8Array,
    UInt32Array,
    add_compensated,
    array,
    compensate,
    compensation,
    compiled,
    largest_of_runs,
    rows_of_bytes,
)
from gradwire.kernels.cpu._packed import pack, unpack
from gradwire.kernels.reference._torch import CHUNK
from gradwire.kernels.reference.exponent import ZERO
from gradwire.layout import Block, Int64Array

_FRACTION_BITS = np.uint32(23)


def exponent_encode(
    block: Block, gradient: Tensor, residual: Tensor | None, beta: float, gamma: float, payload: Tensor
) -> None:
    """See :meth:`gradwire.kernels.Kernels.exponent_encode`."""
    head = 4 * block.segment_count
    packed = array(payload)
    _encode(
        block.runs,
        block.segments,
        *compensation(gradient, residual, beta, gamma),
        packed[:head].view(np.uint32),
        packed[head:],
    )


def exponent_decode(block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
    """See :meth:`gradwire.kernels.Kernels.exponent_decode`."""
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
    scales: UInt32Array,
    packed: UInt8Array,
) -> None:
    t, parts = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    codes = np.empty(CHUNK, np.uint8)
    packed[:] = 0
    for segment in range(scales.size):
        first_run, last_run = segments[segment], segments[segment + 1]
        largest = largest_of_runs(runs[first_run:last_run], gradient, residual, beta, gamma)
        if largest >= INFINITE:
            scales[segment] = np.float32(np.nan).view(np.uint32)
            if keep:
                add_compensated(runs[first_run:last_run], gradient, residual, beta, gamma)
            continue
        top = np.uint32(largest >> _FRACTION_BITS)
        scales[segment] = np.uint32(top << _FRACTION_BITS)
        scale = np.uint32(scales[segment]).view(np.float32)
        for run in range(first_run, last_run):
            start, length, position = runs[run]
            for first in range(0, length, CHUNK):
                low, high = start + first, start + min(first + CHUNK, length)
                memory, values = residual[low:high], t[: high - low]
                compensate(gradient[low:high], memory, beta, gamma, values)
                _round(values, np.int32(top), codes)
                if keep:
                    _read(codes[: high - low], parts)
                    for i in range(values.size):
                        memory[i] = values[i] - parts[i] * scale
                pack(codes, high - low, 4, packed[(position + first) // 2 :])


@compiled
def _round(t: Float32Array, top: np.int32, codes: UInt8Array) -> None:
    """Writes a sign and a distance below the largest exponent for each value."""
    words = t.view(np.uint32)
    half, farthest = np.uint32(1 << 22), np.int32(ZERO)
    for i in range(t.size):
        field = np.int32(np.uint32(np.uint32(words[i] & MAGNITUDE) + half) >> _FRACTION_BITS)
        distance = max(min(np.int32(top - field), farthest), np.int32(0))
        distance = farthest if field == 0 else distance
        codes[i] = np.uint8(distance | np.int32(t[i] < 0) << np.int32(3))


@compiled
def _read(codes: UInt8Array, parts: Float32Array) -> None:
    """What the codes stand for, as multiples of the scale."""
    words = parts.view(np.uint32)
    for i in range(codes.size):
        code = np.uint32(codes[i])
        distance = np.uint32(code & np.uint32(7))
        power = np.uint32(np.uint32(np.uint32(127) - distance) << _FRACTION_BITS)
        power = np.uint32(0) if distance == np.uint32(ZERO) else power
        words[i] = np.uint32(power | np.uint32(np.uint32(code & np.uint32(8)) << np.uint32(28)))


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
    scales = payloads.view(np.float32)
    head = 4 * (segments.size - 1)
    codes = np.empty(CHUNK, np.uint8)
    total, parts = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    for segment in range(segments.size - 1):
        for run in range(segments[segment], segments[segment + 1]):
            start, length, position = runs[run]
            for first in range(0, length, CHUNK):
                count = min(CHUNK, length - first)
                total[:] = -0.0  # to which adding a row gives that row, whichever its sign of zero
                for row in range(rows):
                    base = row * stride + head + (position + first) // 2
                    unpack(payloads[base : base + (count + 7) // 8 * 4], 4, codes)
                    _read(codes[:count], parts)
                    scale = scales[row * stride // 4 + segment]
                    for i in range(count):
                        total[i] += parts[i] * scale
                piece = out[start + first : start + first + count]
                for i in range(count):
                    piece[i] = total[i] * weight
