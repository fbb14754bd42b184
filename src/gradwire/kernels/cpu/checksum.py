"""Checksums of 4-byte words."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gradwire.kernels.cpu._compiled import UInt32Array, array, compiled
from gradwire.layout import Int64Array

TWO = np.uint32(2)


def checksums(words: Tensor, sums: Tensor) -> None:
    _checksums(array(words).view(np.uint32), array(sums))


@compiled
def _checksums(words: UInt32Array, sums: Int64Array) -> None:
    """Integers wrap alike in any order, and the product of two 32-bit numbers is one instruction for many of them."""
    for row in range(words.shape[0]):
        line = words[row]
        total, weight = np.uint64(0), np.uint32(1)
        for i in range(line.shape[0]):
            total += np.uint64(line[i]) * np.uint64(weight)
            weight = np.uint32(weight + TWO)
        sums[row] = np.int64(total)
