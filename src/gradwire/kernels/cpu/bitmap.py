"""Coordinates as one bit for each there is."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gradwire.kernels.cpu._compiled import UInt32Array, array, compiled
from gradwire.kernels.cpu._instructions import trailing_zeros
from gradwire.kernels.reference.bitmap import no_such_bitmap
from gradwire.layout import Int64Array


def bitmap_encode(positions: Tensor, universe: int, payload: Tensor) -> None:
    payload.zero_()
    _encode(array(positions), array(payload).view(np.uint32))


def bitmap_decode(payload: Tensor, universe: int, positions: Tensor) -> None:
    if not _decode(array(payload).view(np.uint32), universe, array(positions)):
        raise no_such_bitmap(positions.numel(), universe)


@compiled
def _encode(positions: Int64Array, words: UInt32Array) -> None:
    for i in range(positions.size):
        words[positions[i] >> 5] |= np.uint32(1 << (positions[i] & 31))


@compiled
def _decode(words: UInt32Array, universe: int, positions: Int64Array) -> bool:
    number = 0
    for index in range(words.size):
        bits = words[index]
        while bits:
            if number == positions.size:
                return False
            positions[number] = 32 * index + trailing_zeros(bits)
            bits = np.uint32(bits & np.uint32(bits - np.uint32(1)))
            number += 1
    return number == positions.size and (number == 0 or positions[number - 1] < universe)
