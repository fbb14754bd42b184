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
    NEAR,
    OCTAVE,
    SAMPLED_CHUNK,
    STEPS,
    chunks_sampled,
    room_of_sample,
    sampling,
    step_of,
    uniform,
)
from gradwire.layout import Block, Int64Array

UNBOUNDED = 1 << 62
"""Bits."""

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
    every = sampling(block, room) if key is None else 1
    ends = np.zeros(-(-relative.size // SAMPLED_CHUNK) + 1 if every > 1 else 0, np.int64)
    step = _STEPS[_choose(relative, drawn, rounded, _STEPS, tile, target, every, ends, codes().lengths)]
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
    every: int,
    ends: Int64Array,
    lengths: UInt8Array,
) -> int:
    low, high = 0, STEPS
    for apart in (NEAR, 0):
        while high - low > (apart if every > 1 else 0):
            middle = (low + high) // 2
            _round(sample, drawn, steps[middle], rounded)
            if _size(rounded, steps[middle], tile, target, ends, lengths) <= target:
                high = middle
            else:
                low = middle + 1
        if apart and every > 1:
            size = _size(sample, steps[high], tile, UNBOUNDED, ends, lengths)
            target -= _doubt(ends, every, target / max(size, 1))
            high = min(high + OCTAVE, STEPS)
    _round(sample, drawn, steps[low], rounded)
    if low > 0 and 2 * _size(rounded, steps[low], tile, target, ends, lengths) < target:
        low -= 1
    return low


@compiled
def _doubt(ends: Int64Array, every: int, weight: float) -> int:
    """Two standard errors of a sample's size, times the weight."""
    squares = np.int64(0)
    for i in range(2, ends.size):
        squares += (ends[i] - 2 * ends[i - 1] + ends[i - 2]) ** 2
    return int(weight * np.sqrt(2 * squares * (every - 1) / every))


@compiled
def _round(sample: Float32Array, drawn: Float32Array, step: np.float32, rounded: Float32Array) -> None:
    """To multiples of the step, if numbers are drawn."""
    inverse = np.float32(1) / step
    for i in range(drawn.size):
        rounded[i] = np.floor(sample[i] * inverse + drawn[i]) * step


@compiled
def _size(sample: Float32Array, step: np.float32, tile: int, most: int, ends: Int64Array, lengths: UInt8Array) -> int:
    """Bits of all codes, or more than ``most``; those up to the end of each chunk are noted where there is room."""
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
        if ends.size:
            ends[first // SAMPLED_CHUNK + 1] = size
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
