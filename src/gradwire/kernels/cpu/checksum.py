"""Checksums of 8-byte words."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gradwire.kernels.cpu._compiled import array, compiled
from gradwire.layout import Int64Array


def checksums(words: Tensor, count: int, sums: Tensor) -> None:
    """See :meth:`gradwire.kernels.Kernels.checksums`."""
    _checksums(array(words), np.int64(count), array(sums))


@compiled
def _checksums(words: Int64Array, count: np.int64, sums: Int64Array) -> None:
    """Integers wrap alike in any order, so the compiler may take many at a time."""
    for row in range(words.shape[0]):
        line = words[row]
        total = np.int64(0)
        for i in range(count):
            word = line[i]
            total += (word ^ ((word >> np.int64(32)) & np.int64(0xFFFFFFFF))) * np.int64(2 * i + 1)
        sums[row] = total
