"""Ascending positions in about two bits more than their entropy."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gradwire.errors import PayloadError
from gradwire.kernels.cpu._compiled import UInt32Array, array, compiled
from gradwire.kernels.cpu._instructions import trailing_zeros
from gradwire.kernels.reference.elias_fano import elias_fano_layout
from gradwire.layout import Int64Array


def elias_fano_encode(positions: Tensor, universe: int, payload: Tensor) -> None:
    count = positions.numel()
    if not count:
        return
    low, high, width = _parts(payload, count, universe)
    if not _encode(array(positions), universe, width, low, high):
        raise PayloadError(f"positions to encode must be ascending, distinct and in [0, {universe})")


def elias_fano_decode(payload: Tensor, universe: int, positions: Tensor) -> None:
    count = positions.numel()
    if not count:
        return
    low, high, width = _parts(payload, count, universe)
    if not _decode(low, high, width, universe, array(positions)):
        raise PayloadError(f"Elias-Fano bytes are not those of {count} ascending, distinct positions below {universe}")


def _parts(payload: Tensor, count: int, universe: int) -> tuple[UInt32Array, UInt32Array, int]:
    """The words of the low bits, the words of the high bits, and how many low bits a position has."""
    width, boundary = elias_fano_layout(count, universe, payload.numel())
    words = array(payload).view(np.uint32)
    return words[: boundary // 4], words[boundary // 4 :], width


@compiled
def _encode(positions: Int64Array, universe: int, width: int, low: UInt32Array, high: UInt32Array) -> bool:
    high[:] = 0
    pending, filled, word = np.uint64(0), 0, 0
    low_mask = (1 << width) - 1
    previous = -1
    for number in range(positions.size):
        position = positions[number]
        if position <= previous or position >= universe:
            return False
        previous = position
        bit = (position >> width) + number
        high[bit >> 5] |= np.uint32(1 << (bit & 31))
        pending |= np.uint64(position & low_mask) << np.uint64(filled)
        filled += width
        if filled >= 32:
            low[word] = np.uint32(pending)
            pending >>= np.uint64(32)
            filled -= 32
            word += 1
    if filled:
        low[word] = np.uint32(pending)
    return True


@compiled
def _decode(low: UInt32Array, high: UInt32Array, width: int, universe: int, positions: Int64Array) -> bool:
    number, previous = 0, -1
    low_mask = (1 << width) - 1
    pending, filled, word = np.uint64(0), 0, 0
    for index in range(high.size):
        bits = high[index]
        while bits:
            bit = 32 * index + trailing_zeros(bits)
            bits = np.uint32(bits & np.uint32(bits - np.uint32(1)))
            if number == positions.size:
                return False
            if filled < width:
                pending |= np.uint64(low[word]) << np.uint64(filled)
                filled += 32
                word += 1
            position = (bit - number) << width | np.int64(pending & np.uint64(low_mask))
            pending >>= np.uint64(width)
            filled -= width
            if position <= previous:
                return False
            previous = position
            positions[number] = position
            number += 1
    return number == positions.size and previous < universe
