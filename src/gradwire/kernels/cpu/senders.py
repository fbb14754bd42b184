"""Averages over those who sent something."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gradwire.kernels.cpu._compiled import (
    Float32Array,
    allocating,
    array,
)
from gradwire.kernels.cpu.sparse import _check
from gradwire.kernels.reference._torch import CHUNK
from gradwire.layout import Block, Int64Array


def scatter_mean(block: Block, positions: Tensor, values: Tensor, out: Tensor) -> None:
    places = array(positions)
    for row in places:
        _check(block, row)
    _scatter(block.runs, places, array(values), array(out))


@allocating
def _scatter(runs: Int64Array, positions: Int64Array, values: Float32Array, out: Float32Array) -> None:
    """Clears, adds, counts and divides a chunk while it is in the cache."""
    rows, count = positions.shape
    cursors = np.zeros(rows, np.int64)
    senders = np.empty(CHUNK, np.int32)
    for run in range(len(runs)):
        start, length, position = runs[run]
        for first in range(0, length, CHUNK):
            last = min(first + CHUNK, length)
            piece = out[start + first : start + last]
            piece[:] = 0
            senders[: piece.size] = 0
            base, limit = position + first, position + last
            for row in range(rows):
                cursor = cursors[row]
                while cursor < count and positions[row, cursor] < limit:
                    place = positions[row, cursor] - base
                    piece[place] += values[row, cursor]
                    senders[place] += 1
                    cursor += 1
                cursors[row] = cursor
            for i in range(piece.size):
                piece[i] /= np.float32(max(senders[i], 1))
