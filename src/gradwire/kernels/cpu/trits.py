"""Five digits of base 3 a byte."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gradwire.kernels.cpu._compiled import Float32Array, UInt8Array, array, compiled, rows_of_bytes
from gradwire.kernels.reference._torch import CHUNK
from gradwire.kernels.reference.trits import trits_stride
from gradwire.layout import Block, Int64Array


def trits_decode(block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
    """See :meth:`gradwire.kernels.Kernels.trits_decode`."""
    packed, stride = rows_of_bytes(payloads)
    _decode(
        block.runs,
        block.segments,
        packed,
        len(payloads),
        stride,
        trits_stride(block.positions),
        array(out),
        np.float32(weight),
    )


@compiled
def put_trits(packed: UInt8Array, position: int, digits: UInt8Array) -> None:
    """Adds the digits of consecutive positions to bytes in which they are 0."""
    done = 0
    while done < digits.size:
        row, byte = divmod(position + done, packed.size)
        count = min(packed.size - byte, digits.size - done)
        weight = np.uint8(3**row)
        target, source = packed[byte : byte + count], digits[done : done + count]
        for i in range(count):
            target[i] = np.uint8(target[i] + np.uint8(source[i] * weight))
        done += count


@compiled
def _add_trits(packed: UInt8Array, position: int, scale: np.float32, total: Float32Array) -> None:
    """Adds the scaled digits of ``total.size`` consecutive positions."""
    done = 0
    while done < total.size:
        row, byte = divmod(position + done, packed.size)
        count = min(packed.size - byte, total.size - done)
        _add_row(packed[byte : byte + count], row, scale, total[done : done + count])
        done += count


@compiled
def _add_row(packed: UInt8Array, row: int, scale: np.float32, total: Float32Array) -> None:
    """Adds one scaled digit of each byte; a byte is divided by multiplying with a rounded-up reciprocal."""
    power = 3**row
    reciprocal = np.uint32((65536 + power - 1) // power)
    third, three, half = np.uint32(21846), np.uint32(3), np.uint32(16)
    for i in range(total.size):
        quotient = np.uint32(np.uint32(np.uint32(packed[i]) * reciprocal) >> half)
        lower = np.uint32(np.uint32(np.uint32(quotient * third) >> half) * three)
        total[i] += (np.float32(np.int32(quotient - lower)) - np.float32(1)) * scale


@compiled
def _decode(
    runs: Int64Array,
    segments: Int64Array,
    payloads: UInt8Array,
    rows: int,
    stride: int,
    size: int,
    out: Float32Array,
    weight: np.float32,
) -> None:
    scales = payloads.view(np.float32)
    head = 4 * (segments.size - 1)
    total = np.empty(CHUNK, np.float32)
    for segment in range(segments.size - 1):
        for run in range(segments[segment], segments[segment + 1]):
            start, length, position = runs[run]
            for first in range(0, length, CHUNK):
                count = min(CHUNK, length - first)
                total[:] = -0.0  # to which adding a row gives that row, whichever its sign of zero
                for row in range(rows):
                    packed = payloads[row * stride + head : row * stride + head + size]
                    scale = scales[row * stride // 4 + segment]
                    _add_trits(packed, position + first, scale, total[:count])
                piece = out[start + first : start + first + count]
                for i in range(count):
                    piece[i] = total[i] * weight
