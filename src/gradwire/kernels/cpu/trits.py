"""Five digits of base 3 a byte."""

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu._compiled import Float32Array, UInt8Array, compiled, inlined


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
def add_trits(packed: UInt8Array, position: int, scale: np.float32, total: Float32Array) -> None:
    """Adds digits of consecutive positions, less one and scaled."""
    done = 0
    while done < total.size:
        row, byte = divmod(position + done, packed.size)
        count = min(packed.size - byte, total.size - done)
        _add_row(packed[byte : byte + count], row, scale, total[done : done + count])
        done += count


@inlined
def _add_row(packed: UInt8Array, row: int, scale: np.float32, total: Float32Array) -> None:
    """Adds one scaled digit of each byte; a byte is divided by multiplying with a rounded-up reciprocal."""
    power = 3**row
    reciprocal = np.uint32((65536 + power - 1) // power)
    third, three, half = np.uint32(21846), np.uint32(3), np.uint32(16)
    for i in range(total.size):
        quotient = np.uint32(np.uint32(np.uint32(packed[i]) * reciprocal) >> half)
        lower = np.uint32(np.uint32(np.uint32(quotient * third) >> half) * three)
        total[i] += (np.float32(np.int32(quotient - lower)) - np.float32(1)) * scale
