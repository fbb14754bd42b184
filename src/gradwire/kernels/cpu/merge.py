"""Two sparse sets into one."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from gradwire.kernels.cpu._compiled import (
    INFINITE,
    Float32Array,
    allocating,
    array,
    compiled,
    copy,
    largest_magnitude,
)
from gradwire.kernels.cpu.topk import _choose, _threshold
from gradwire.layout import Int64Array

BoolArray = np.ndarray[Any, np.dtype[np.bool_]]


def merge_top(
    counts: Int64Array,
    first_positions: Tensor,
    first_values: Tensor,
    second_positions: Tensor,
    second_values: Tensor,
    positions: Tensor,
    values: Tensor,
) -> None:
    first, second = (first_positions, first_values), (second_positions, second_values)
    _merge(counts, *map(array, (*first, *second, positions, values)))


def survivors(positions: Tensor, kept_positions: Tensor, kept_values: Tensor, flags: Tensor) -> None:
    _survivors(array(positions), array(kept_positions), array(kept_values), array(flags))


@allocating
def _merge(
    counts: Int64Array,
    first_positions: Int64Array,
    first_values: Float32Array,
    second_positions: Int64Array,
    second_values: Float32Array,
    positions: Int64Array,
    values: Float32Array,
) -> None:
    room = 0
    for count in counts:
        room = max(room, 2 * count)
    places = np.empty(room, np.int64)
    totals = np.empty(room, np.float32)
    written = 0
    for count in counts:
        stop = written + count
        found = _union(
            first_positions[written:stop],
            first_values[written:stop],
            second_positions[written:stop],
            second_values[written:stop],
            places,
            totals,
        )
        if largest_magnitude(totals[:found]) >= INFINITE:
            copy(places[:count], positions[written:stop])
            values[written:stop] = np.nan
        elif count > 0:
            threshold, ties = _threshold(totals[:found], count)
            _choose(places[:found], totals[:found], threshold, ties, positions[written:stop], values[written:stop])
        written = stop


@compiled
def _union(
    first_positions: Int64Array,
    first_values: Float32Array,
    second_positions: Int64Array,
    second_values: Float32Array,
    places: Int64Array,
    totals: Float32Array,
) -> int:
    """Ascending positions of both sets, and their values added where both have one; returns how many there are."""
    i, j, found = 0, 0, 0
    while i < first_positions.size or j < second_positions.size:
        if j == second_positions.size or (i < first_positions.size and first_positions[i] < second_positions[j]):
            places[found], totals[found] = first_positions[i], first_values[i]
            i += 1
        elif i == first_positions.size or second_positions[j] < first_positions[i]:
            places[found], totals[found] = second_positions[j], second_values[j]
            j += 1
        else:
            places[found], totals[found] = first_positions[i], first_values[i] + second_values[j]
            i += 1
            j += 1
        found += 1
    return found


@compiled
def _survivors(positions: Int64Array, kept_positions: Int64Array, kept_values: Float32Array, flags: BoolArray) -> None:
    j = 0
    for i in range(positions.size):
        while j < kept_positions.size and kept_positions[j] < positions[i]:
            j += 1
        if j == kept_positions.size or kept_positions[j] != positions[i] or not np.isfinite(kept_values[j]):
            flags[i] = False
