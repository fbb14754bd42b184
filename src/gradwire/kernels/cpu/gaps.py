"""Distances between ascending positions, each as a class that is worth coding and low bits that are not."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gradwire.errors import PayloadError
from gradwire.kernels.cpu._compiled import UInt8Array, UInt32Array, array, compiled
from gradwire.kernels.reference.gaps import LARGEST_CLASS, not_gaps
from gradwire.layout import Int64Array


def gaps_encode(positions: Tensor, universe: int, classes: Tensor, low: Tensor) -> int:
    words = _encode(array(positions), universe, array(classes), array(low).view(np.uint32))
    if words < 0:
        raise PayloadError(f"positions to encode must be ascending, distinct and in [0, {universe})")
    return 4 * int(words)


def gaps_decode(classes: Tensor, low: Tensor, universe: int, positions: Tensor) -> None:
    if not _decode(array(classes), array(low).view(np.uint32), universe, array(positions)):
        raise not_gaps(classes.numel(), universe)


@compiled
def _encode(positions: Int64Array, universe: int, classes: UInt8Array, low: UInt32Array) -> int:
    """How many words of low bits there are; -1 for positions that cannot be written."""
    pending, filled, word, previous = np.uint64(0), np.int64(0), np.int64(0), np.int64(-1)
    for number in range(positions.size):
        position = positions[number]
        if position <= previous or position >= universe:
            return -1
        gap = position - previous
        previous = position
        exponent = _exponent(gap)
        width = _low_width(exponent)
        classes[number] = np.uint8(2 * exponent + (gap >> width & 1))
        rest = np.uint64(gap & ((np.int64(1) << width) - 1))
        while width > 0:
            taken = np.int64(min(width, 32))
            pending |= (rest & np.uint64(0xFFFFFFFF)) << np.uint64(filled)
            rest >>= np.uint64(32)
            filled += taken
            width -= taken
            if filled >= 32:
                low[word] = np.uint32(pending)
                pending >>= np.uint64(32)
                filled -= 32
                word += 1
    if filled:
        low[word] = np.uint32(pending)
        word += 1
    return int(word)


@compiled
def _decode(classes: UInt8Array, low: UInt32Array, universe: int, positions: Int64Array) -> bool:
    wanted = np.int64(0)
    for number in range(classes.size):
        if not 1 <= classes[number] <= LARGEST_CLASS:
            return False
        wanted += _low_width(np.int64(classes[number] >> 1))
    if wanted > 32 * low.size:
        return False
    pending, filled, word, previous = np.uint64(0), np.int64(0), np.int64(0), np.int64(-1)
    for number in range(classes.size):
        kind = np.int64(classes[number])
        width = _low_width(kind >> 1)
        gap = np.int64(1 if kind == 1 else 2 + (kind & 1)) << width
        done = np.int64(0)
        while done < width:
            taken = np.int64(min(width - done, 32))
            if filled < taken:
                pending |= np.uint64(low[word]) << np.uint64(filled)
                filled += 32
                word += 1
            gap |= np.int64(pending & ((np.uint64(1) << np.uint64(taken)) - np.uint64(1))) << done
            pending >>= np.uint64(taken)
            filled -= taken
            done += taken
        if gap > universe - 1 - previous:
            return False
        previous += gap
        positions[number] = previous
    return True


@compiled
def _low_width(exponent: np.int64) -> np.int64:
    """How many bits of a gap of ``2**exponent`` and more its class says nothing of."""
    return exponent - 1 if exponent > 1 else np.int64(0)


@compiled
def _exponent(gap: np.int64) -> np.int64:
    """The largest power of two in a positive number."""
    exponent = np.int64(0)
    for step in (32, 16, 8, 4, 2, 1):
        if gap >> step:
            gap >>= step
            exponent += step
    return exponent
