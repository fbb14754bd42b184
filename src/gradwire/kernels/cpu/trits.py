"""Five digits of base 3 a byte."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradwire.kernels.cpu._compiled import Float32Array, UInt8Array, compiled, inlined
from gradwire.kernels.cpu.quantise import Scratch


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


def write_trits(code: Any, position: int, count: int, body: UInt8Array, scratch: Scratch) -> None:
    """Packs digits."""
    put_trits(body, position, scratch.codes[:count])


def add_trits(
    code: Any, low: int, high: int, position: int, scale: Float32Array, body: UInt8Array, scratch: Scratch
) -> None:
    """Adds scaled digits."""
    add_digits(body, position, scale[0], scratch.t[low:high])


@inlined
def add_digits(body: UInt8Array, position: int, scale: np.float32, total: Float32Array) -> None:
    """Adds scaled digits of consecutive positions."""
    done = 0
    while done < total.size:
        row, byte = divmod(position + done, body.size)
        count = min(body.size - byte, total.size - done)
        _add_row(body[byte : byte + count], row, scale, total[done : done + count])
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
