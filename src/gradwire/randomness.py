"""Random numbers that depend on what they are for, and on nothing else.

Every number is a hash of (seed, step, rank, parameter name, element index): no generator, hence no state to keep, and
no torch generator is ever touched. An element's number is the same however parameters are bucketed, cut into segments
or sharded, and on every device.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from gradwire.layout import UInt64Array

SHARED = -1
"""The rank that stands for all ranks: numbers on which they must agree."""

FIRST_FACTOR = 0x21F0AAAD
SECOND_FACTOR = 0xD35A2D97
MASK32 = 0xFFFFFFFF
MASK64 = 0xFFFFFFFFFFFFFFFF


def key_of(seed: int, step: int, rank: int = SHARED) -> int:
    """The 64-bit key of one step on one rank, or on all of them with ``SHARED``."""
    key = 0
    for part in (seed, step, rank):
        key = mix64(key ^ mix64(part & MASK64))
    return key


def mix64(value: int) -> int:
    """The next output of SplitMix64 at state ``value``: a bijection of 64-bit numbers that changes half the bits."""
    value = (value + 0x9E3779B97F4A7C15) & MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def run_keys(key: int, streams: UInt64Array) -> UInt64Array:
    """``mix64(key ^ stream)`` of every run: the key under which its elements are numbered."""
    value = (streams ^ np.uint64(key)) + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: UInt64Array = value ^ (value >> np.uint64(31))
    return mixed


def hash32(key: int, counters: Tensor) -> Tensor:
    """32 random bits for each counter (an element's index within its parameter, modulo ``2**32``), as int64.

    The two-multiply finaliser of Wellons' hash-prospector, with one half of the key entering before the first multiply
    and the other before the second, all modulo ``2**32``::

        x  = counter ^ low(key)
        x ^= x >> 16;  x *= FIRST_FACTOR
        x ^= x >> 15;  x ^= high(key);  x *= SECOND_FACTOR
        x ^= x >> 15
    """
    bits = (counters ^ (key & MASK32)) & MASK32
    bits = (bits ^ (bits >> 16)) * FIRST_FACTOR & MASK32
    bits = (bits ^ (bits >> 15) ^ (key >> 32)) * SECOND_FACTOR & MASK32
    return bits ^ (bits >> 15)


def gaussian(key: int, count: int, device: torch.device = torch.device("cpu")) -> Tensor:  # noqa: B008
    """``float32[count]`` of mean 0 and variance 1, as good as normal, with the same bits on every machine and device.

    A number is the sum of eight 16-bit ones, whole until it is scaled: logarithms and cosines are not rounded alike
    everywhere.
    """
    halves = hash32(key, torch.arange(4 * count, device=device))
    sums = ((halves >> 16) + (halves & 0xFFFF)).view(count, 4).sum(1)
    return (sums - 4 * 0xFFFF).float() / math.sqrt(8 * (2**32 - 1) / 12)
