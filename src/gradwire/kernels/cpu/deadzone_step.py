"""The finest step under which codes have room."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor, from_numpy

from gradwire.kernels.cpu._compiled import Float32Array, UInt8Array, array, compiled, inlined
from gradwire.kernels.cpu._instructions import reaching_mask, trailing_zeros
from gradwire.kernels.cpu._levels import class_of, context_of, following, level_of, threshold_of
from gradwire.kernels.reference._torch import LANES
from gradwire.kernels.reference.deadzone import LIMIT
from gradwire.kernels.reference.deadzone_codes import ESCAPE, LEVEL_CLASSES, RAW, codes
from gradwire.kernels.reference.deadzone_step import (
    HIGHEST_POINT,
    SAMPLED_CHUNK,
    STEPS,
    chunks_sampled,
    few_of,
    index_of,
    room_of_sample,
    sampling,
    step_of,
    uniform,
)
from gradwire.layout import Block, Int64Array

UNBOUNDED = 1 << 62
"""Bits."""

_STEPS = np.array([step_of(index) for index in range(STEPS + 1)], np.float32)


class _Sample(NamedTuple):
    """A sample of values.

    Attributes:
        values: They.
        drawn: For each of them a number by which it is rounded; empty if they are not.
        rounded: The same memory as ``values`` if they are not, else room for what they are rounded to.
    """

    values: Float32Array
    drawn: Float32Array
    rounded: Float32Array

    @classmethod
    def of(cls, sample: Tensor, drawn: Tensor | None) -> _Sample:
        """For values that are rounded by numbers, if any are drawn."""
        values = array(sample)
        return cls(values, *((np.empty(0, np.float32), values) if drawn is None else (array(drawn), values.copy())))


def deadzone_sample(block: Block, values: Tensor, scales: Tensor, room: int, turn: int = 0) -> Tensor:
    chunks = chunks_sampled(block, room, turn)
    sample = np.zeros(-(-int(chunks[:, 1].sum()) // LANES) * LANES, np.float32)
    _take(chunks, array(values), array(scales), sample)
    return from_numpy(sample)


def deadzone_step(
    block: Block,
    sample: Tensor,
    tile: int,
    room: int,
    key: int | None = None,
    turn: int = 0,
    near: float | None = None,
    exactly: bool = True,
) -> tuple[float, tuple[int, int, int]]:
    target = room_of_sample(block, room, key is not None, turn)
    every = sampling(block, room) if key is None else 1
    drawn = None if key is None else uniform(key, sample.numel(), sample.device)
    of_all, of_few = _Sample.of(sample, drawn), _Sample.of(few_of(sample), None if drawn is None else few_of(drawn))
    ends = np.zeros(-(-sample.numel() // SAMPLED_CHUNK) + 1 if every > 1 else 0, np.int64)
    first = -1 if near is None else index_of(near)
    taken = codes().taken.reshape(-1)
    step = _STEPS[_choose(of_all, of_few, _STEPS, tile, target, every, ends, taken, first, exactly)]
    points = np.zeros(3, np.int64)
    _points(of_all.values, step, points, np.zeros(3, np.int64))
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
    sample: _Sample,
    few: _Sample,
    steps: Float32Array,
    tile: int,
    target: int,
    every: int,
    ends: Int64Array,
    taken: UInt8Array,
    guess: int,
    exactly: bool,
) -> int:
    """Its constants are variables, as Numba would compile what it calls once more for each: half a second of all."""
    none, unbounded, all_steps, one = ends[:0], np.int64(UNBOUNDED), np.int64(STEPS), np.int64(1)
    all_are_few = few.values.size == sample.values.size
    if guess < 0 or all_are_few:
        share = target * few.values.size // max(sample.values.size, 1)
        guess, _ = _finest(few, steps, tile, share, all_steps // 2, all_steps, none, taken)
    size = max(_size_at(sample, steps[guess], tile, unbounded, ends, taken), 1)
    alike = target <= 2 * size and size <= 2 * target
    if not alike:
        guess, _ = _finest(sample, steps, tile, target, guess, one, none, taken)
        size = max(_size_at(sample, steps[guess], tile, unbounded, ends, taken), 1)
    aim = target
    if every > 1:
        aim -= min(_doubt(ends, every, target / size), target // 2)
    if alike:
        share = _size_at(few, steps[guess], tile, unbounded, none, taken) * aim // size
        guess, _ = _finest(few, steps, tile, share, guess, one, none, taken)
    if exactly or all_are_few or not alike:
        guess, size = _finest(sample, steps, tile, aim, guess, one, none, taken)
        if guess > 0 and 2 * size < target:
            finer = _told_at(sample, steps[guess - 1], tile, target, taken)
            guess -= finer > _told_at(sample, steps[guess], tile, target, taken)
    return guess


@compiled
def _finest(
    sample: _Sample,
    steps: Float32Array,
    tile: int,
    target: int,
    guess: int,
    reach: int,
    none: Int64Array,
    taken: UInt8Array,
) -> tuple[int, int]:
    low, high, least, guess = 0, STEPS, target, min(guess, STEPS - 1)
    while low < high:
        size = _size_at(sample, steps[guess], tile, target, none, taken)
        if size <= target:
            high, least = guess, size
            guess = max((low + high) // 2, high - reach)
        else:
            low = guess + 1
            guess = min((low + high) // 2, low + reach - 1)
        reach *= 2
    return low, least


@compiled
def _doubt(ends: Int64Array, every: int, weight: float) -> int:
    """Two standard errors of a sample's size, times the weight."""
    squares = np.int64(0)
    for i in range(2, ends.size):
        squares += (ends[i] - 2 * ends[i - 1] + ends[i - 2]) ** 2
    return int(weight * np.sqrt(2 * squares * (every - 1) / every))


@compiled
def _size_at(sample: _Sample, step: np.float32, tile: int, most: int, ends: Int64Array, taken: UInt8Array) -> int:
    """Bits of all codes of what is rounded, or more than ``most``.

    Bits up to the end of each chunk are noted where there is room for that.
    """
    _round(sample, step)
    values, inverse, threshold = sample.rounded, np.float32(1) / step, threshold_of(step)
    previous, size, activity, end = np.int64(-1), np.int64(0), np.int64(0), np.int64(tile)
    for first in range(0, values.size, LANES):
        mask = reaching_mask(values, first, threshold)
        while mask:
            place = first + trailing_zeros(mask)
            mask &= mask - np.uint32(1)
            if place >= end:
                previous = place // tile * tile - 1
                end, activity = previous + 1 + tile, np.int64(0)
            bits, activity = _taken(values[place] * inverse, place - previous, activity, taken)
            size += bits
            previous = place
        if size > most:
            break
        if ends.size:
            ends[first // SAMPLED_CHUNK + 1] = size
    return int(size)


@compiled
def _told_at(sample: _Sample, step: np.float32, tile: int, most: int, taken: UInt8Array) -> float:
    """The squares of values whose codes have room."""
    _round(sample, step)
    values, inverse, threshold = sample.rounded, np.float32(1) / step, threshold_of(step)
    previous, size, activity, squares = np.int64(-1), np.int64(0), np.int64(0), np.float64(0)
    for i in range(values.size):
        place = np.int64(i)
        if np.float32(values[place]).view(np.uint32) < threshold:
            continue
        if place // tile != previous // tile:
            previous, activity = place // tile * tile - 1, np.int64(0)
        bits, activity = _taken(values[place] * inverse, place - previous, activity, taken)
        size += bits
        if size > most:
            break
        squares += np.float64(values[place]) ** 2
        previous = place
    return float(squares)


@compiled
def _round(sample: _Sample, step: np.float32) -> None:
    """Rounds a sample, if numbers are drawn."""
    inverse = np.float32(1) / step
    for i in range(sample.drawn.size):
        sample.rounded[i] = np.floor(sample.values[i] * inverse + sample.drawn[i]) * step


@inlined
def _taken(relative: np.float32, gap: np.int64, activity: np.int64, taken: UInt8Array) -> tuple[np.int64, np.int64]:
    """Bits of a value and its code, and how active the values before the next one are."""
    level, gap_class = level_of(relative), class_of(gap)
    level_class = np.int64(RAW) if level == LIMIT else class_of(level)
    symbol = context_of(activity) * ESCAPE + gap_class * LEVEL_CLASSES + level_class
    return np.int64(taken[np.uint64(symbol)]), following(activity, gap_class, level_class)


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
