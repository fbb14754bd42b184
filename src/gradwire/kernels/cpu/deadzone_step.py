"""The finest step under which codes have room."""

from __future__ import annotations

import numpy as np
from torch import Tensor, from_numpy

from gradwire.kernels.cpu._compiled import Float32Array, UInt8Array, array, compiled
from gradwire.kernels.cpu._instructions import reaching_mask, trailing_zeros
from gradwire.kernels.cpu._levels import class_of, context_of, following, level_of, low_bits, threshold_of
from gradwire.kernels.reference._torch import LANES
from gradwire.kernels.reference.deadzone import LIMIT
from gradwire.kernels.reference.deadzone_codes import LEVEL_CLASSES, RAW, codes
from gradwire.kernels.reference.deadzone_step import (
    HIGHEST_POINT,
    STEPS,
    chunks_sampled,
    room_of_sample,
    step_of,
    uniform,
)
from gradwire.layout import Block, Int64Array

_STEPS = np.array([step_of(index) for index in range(STEPS + 1)], np.float32)


def deadzone_sample(block: Block, values: Tensor, scales: Tensor, room: int) -> Tensor:
    chunks = chunks_sampled(block, room)
    sample = np.zeros(-(-int(chunks[:, 1].sum()) // LANES) * LANES, np.float32)
    _take(chunks, array(values), array(scales), sample)
    return from_numpy(sample)


def deadzone_step(
    block: Block, sample: Tensor, tile: int, room: int, key: int | None = None
) -> tuple[float, tuple[int, int, int]]:
    relative, target = array(sample), room_of_sample(block, room, key is not None)
    drawn = np.empty(0, np.float32) if key is None else array(uniform(key, relative.size, sample.device))
    rounded = relative if key is None else np.zeros_like(relative)
    step = _STEPS[_choose(relative, drawn, rounded, _STEPS, tile, target, codes().lengths)]
    points = np.zeros(3, np.int64)
    _points(relative, step, points, np.zeros(3, np.int64))
    return float(step), (int(points[0]), int(points[1]), int(points[2]))


@compiled
def _take(chunks: Int64Array, values: Float32Array, scales: Float32Array, sample: Float32Array) -> None:
    for number in range(len(chunks)):
        start, count, segment, at = chunks[number]
        scale = scales[segment]
        if scale > 0:
            inverse, t, magnitudes = np.float32(1) / scale, values[start : start + count], sample[at : at + count]
            for i in range(t.size):
                magnitudes[i] = abs(t[i]) * inverse


@compiled
def _choose(
    sample: Float32Array,
    drawn: Float32Array,
    rounded: Float32Array,
    steps: Float32Array,
    tile: int,
    target: int,
    lengths: UInt8Array,
) -> int:
    low, high = 0, STEPS
    while low < high:
        middle = (low + high) // 2
        _round(sample, drawn, steps[middle], rounded)
        if _size(rounded, steps[middle], tile, target, lengths) <= target:
            high = middle
        else:
            low = middle + 1
    _round(sample, drawn, steps[low], rounded)
    if low > 0 and 2 * _size(rounded, steps[low], tile, target, lengths) < target:
        low -= 1
    return low


@compiled
def _round(sample: Float32Array, drawn: Float32Array, step: np.float32, rounded: Float32Array) -> None:
    """To multiples of the step, if numbers are drawn."""
    inverse = np.float32(1) / step
    for i in range(drawn.size):
        rounded[i] = np.floor(sample[i] * inverse + drawn[i]) * step


@compiled
def _size(sample: Float32Array, step: np.float32, tile: int, most: int, lengths: UInt8Array) -> int:
    """Bits of all codes, or more than ``most``."""
    inverse, threshold = np.float32(1) / step, threshold_of(step)
    previous, size, activity, end = np.int64(-1), np.int64(0), np.int64(0), np.int64(tile)
    for first in range(0, sample.size, LANES):
        mask = reaching_mask(sample, first, threshold)
        while mask:
            place = first + trailing_zeros(mask)
            mask &= mask - np.uint32(1)
            level = level_of(sample[place] * inverse)
            if place >= end:
                previous = place // tile * tile - 1
                end, activity = previous + 1 + tile, np.int64(0)
            gap_class = class_of(place - previous)
            level_class = np.int64(RAW) if level == LIMIT else class_of(level)
            width = np.int64(31) if level == LIMIT else low_bits(level_class)
            size += np.int64(lengths[context_of(activity), gap_class * LEVEL_CLASSES + level_class])
            size += low_bits(gap_class) + 1 + width
            activity = following(activity, gap_class, level_class)
            previous = place
        if size > most:
            return int(size)
    return int(size)


@compiled
def _points(sample: Float32Array, step: np.float32, points: Int64Array, counts: Int64Array) -> None:
    inverse, threshold = np.float32(1) / step, threshold_of(step)
    for first in range(0, sample.size, LANES):
        mask = reaching_mask(sample, first, threshold)
        while mask:
            relative = sample[first + trailing_zeros(mask)] * inverse
            mask &= mask - np.uint32(1)
            level = level_of(relative)
            if level < LIMIT:
                place = (relative - np.float32(level)) * np.float32(256) + np.float32(128)
                points[min(level, 3) - 1] += np.int64(min(max(place, np.float32(0)), np.float32(255)))
                counts[min(level, 3) - 1] += 1
    for i in range(3):
        points[i] = min(points[i] // counts[i], HIGHEST_POINT) if counts[i] else 128
