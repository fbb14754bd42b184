"""The finest step under which codes have room, by a sample of the values; and values rounded by chance."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels.reference._torch import LANES, flat_runs
from gradwire.kernels.reference.deadzone import LIMIT, THRESHOLD, Coder, class_of, levels_of
from gradwire.kernels.reference.deadzone_codes import LEVEL_CLASSES, RAW, codes
from gradwire.layout import Block, Int64Array
from gradwire.randomness import hash32, run_keys

SAMPLED_ELEMENTS = 2**17
"""By so many elements the step is chosen,"""

SAMPLED_BITS = 2**16
"""or by more, so that their codes take so many bits; by all if there are fewer, or not so many bits."""

SAMPLED_CHUNK = 64
"""Consecutive elements that are looked at."""

SPREAD = 0x9E3779B9
"""Of 2**32, by which the place of what is looked at moves on: the golden section, which goes with no length of rows."""

MARGIN = 63 / 64
"""Share of the room that is aimed at where values are rounded by chance, which is drawn anew once the step is known."""

OCTAVE = 256

STEPS = 45 * OCTAVE
"""Steps to choose from, so many an octave, from :data:`FINEST` on."""

NEAR = 64
"""Steps that a step may be away where it is asked by how much a sample may be off."""

FINEST = 2.0**-20
"""Relative to the mean magnitude of a segment."""

HIGHEST_POINT = 204
"""A level stands for at most ``(HIGHEST_POINT - 128) / 256`` of a step more, lest a value be off by more than it is."""


def deadzone_sample(block: Block, values: Tensor, scales: Tensor, room: int) -> Tensor:
    """Magnitudes of the :func:`chunks_sampled`, relative to the scale of their segment.

    Args:
        block: Which elements.
        values: ``float32`` flat buffer of compensated values.
        scales: As :func:`deadzone_scales` gave them.
        room: Bits.

    Returns:
        ``float32[n]``, 0 where a scale is not positive, and zeros up to a multiple of :data:`LANES`.
    """
    found = []
    for start, count, segment, _ in chunks_sampled(block, room).tolist():
        scale, chunk = scales[segment], values[start : start + count].abs()
        found.append(chunk * (1 / scale) if bool(scale > 0) else torch.zeros_like(chunk))
    sample = torch.cat(found) if found else values.new_empty(0)
    return torch.nn.functional.pad(sample, (0, -len(sample) % LANES))


def deadzone_step(
    block: Block, sample: Tensor, tile: int, room: int, key: int | None = None
) -> tuple[float, tuple[int, int, int]]:
    """The finest step under which codes have room, by a sample of the values.

    By a sample that is not all of them room is aimed at that is two standard errors of its size smaller. Where that
    leaves more than half of the room empty, because many values are alike, it is one step finer, and the last ones
    find no room.

    Args:
        block: Which elements.
        sample: As :func:`deadzone_sample` gave it.
        tile: Elements of a tile.
        room: Bits.
        key: Randomness, for values that :func:`deadzone_dither` is to round.

    Returns:
        The step, relative to the segments' scales, and the points of levels 1, 2 and more.
    """
    target = room_of_sample(block, room, key is not None)
    drawn = None if key is None else uniform(key, sample.numel(), sample.device)
    low, high = 0, STEPS
    if drawn is None and (every := sampling(block, room)) > 1:
        low, high = _between(sample, drawn, tile, target, low, high, NEAR)
        target -= _doubt(sample, high, tile, every, target)
        high = min(high + OCTAVE, STEPS)
    low, _ = _between(sample, drawn, tile, target, low, high, 0)
    if low and 2 * _size(_rounded(sample, low, drawn), low, tile, target) < target:
        low -= 1
    return step_of(low), _points(sample, low)


def uniform(key: int, count: int, device: torch.device, first: int = 0) -> Tensor:
    """Numbers from 0 to 1, the end not included: ``float32[count]``."""
    return (hash32(key, torch.arange(first, first + count, device=device)) >> 8).float() * 2.0**-24


def sampling(block: Block, room: int) -> int:
    """Of how many chunks one is looked at."""
    return max(min(-(-block.numel // SAMPLED_ELEMENTS), -(-room // SAMPLED_BITS)), 1)


def chunks_sampled(block: Block, room: int) -> Int64Array:
    """``int64[C, 4]``: first element of a chunk that is looked at, number, segment, and elements of those before.

    One of every so many, each time at another place among them. At the same one they would be of rows that have
    something in common: with 256 rows of 512, of every fourth byte's.
    """
    start, length, _ = block.runs.T
    counts = -(-length // SAMPLED_CHUNK)
    ends, every = np.cumsum(counts), sampling(block, room)
    total = int(ends[-1]) if len(ends) else 0
    group = np.arange(-(-total // every))
    number = np.minimum(group * every + ((group * SPREAD % 2**32) * every >> 32), total - 1)
    run = np.searchsorted(ends, number, side="right")
    first = (number - (ends - counts)[run]) * SAMPLED_CHUNK
    taken = np.minimum(SAMPLED_CHUNK, length[run] - first)
    segment = np.searchsorted(block.segments[1:], run, side="right")
    return np.stack((start[run] + first, taken, segment, np.cumsum(taken) - taken), axis=1)


def room_of_sample(block: Block, room: int, drawn: bool) -> int:
    """Bits that the codes of a sample may take, of the share of the room that is its own."""
    taken = int(chunks_sampled(block, room)[:, 1].sum())
    share = room * (taken / max(block.numel, 1))
    return int(share * MARGIN) if drawn else room if taken == block.numel else int(share)


def step_of(index: int) -> float:
    """The float32 so many steps above the finest one, evenly spaced within an octave."""
    first = np.float32(FINEST).view(np.uint32)
    return float(np.uint32(first + (index << 15)).view(np.float32))


def deadzone_dither(block: Block, values: Tensor, steps: Tensor, key: int, out: Tensor) -> None:
    """Rounds values to one of the two multiples of their step beside them, so that they are right on average.

    Those of :data:`LIMIT` steps and more stay; zeros are written where a step is 0 or not finite.
    """
    keys = run_keys(key, block.streams).tolist()
    for segment in range(block.segment_count):
        step = steps[segment]
        for run, start, stop, _ in flat_runs(block, segment):
            t, relative = values[start:stop], values[start:stop].abs() * (1 / step)
            levels = (relative + uniform(keys[run], stop - start, t.device, int(block.origins[run]))).floor()
            rounded = torch.where(relative < LIMIT, torch.where(t < 0, -1.0, 1.0) * (levels * step), t)
            out[start:stop] = rounded if bool(step > 0) and bool(step.isfinite()) else 0.0


def _rounded(sample: Tensor, index: int, drawn: Tensor | None) -> Tensor:
    """Multiples of a step, if numbers are drawn."""
    step = torch.tensor(step_of(index), dtype=torch.float32)
    return sample if drawn is None else (sample * (1 / step) + drawn).floor() * step


def _between(
    sample: Tensor, drawn: Tensor | None, tile: int, target: int, low: int, high: int, apart: int
) -> tuple[int, int]:
    """Between which two, no further apart, the number of the finest step is whose codes take no more."""
    while high - low > apart:
        middle = (low + high) // 2
        if _size(_rounded(sample, middle, drawn), middle, tile, target) <= target:
            high = middle
        else:
            low = middle + 1
    return low, high


def _size(sample: Tensor, index: int, tile: int, most: int) -> int:
    """Bits of all codes, or more than ``most``."""
    size = 0
    for _, bits in _sizes(sample, index, tile):
        size += bits
        if size > most:
            break
    return size


def _doubt(sample: Tensor, index: int, tile: int, every: int, target: int) -> int:
    """Two standard errors, of a sample of one chunk of so many whose codes are to take so many bits.

    By what chunks that follow one another differ: how sizes change from layer to layer is no chance.
    """
    bits = [0] * -(-sample.numel() // SAMPLED_CHUNK)
    for place, taken in _sizes(sample, index, tile):
        bits[place // SAMPLED_CHUNK] += taken
    squares = sum((after - before) ** 2 for before, after in pairwise(bits))
    return int(target / max(sum(bits), 1) * math.sqrt(2 * squares * (every - 1) / every))


def _sizes(sample: Tensor, index: int, tile: int) -> Iterator[tuple[int, int]]:
    """Where codes are, and how many bits each takes."""
    step = torch.tensor(step_of(index), dtype=torch.float32)
    places = (sample >= step * THRESHOLD).nonzero()[:, 0]
    levels = levels_of(sample[places] * (1 / step)).tolist()
    coder, lengths = Coder(), codes().lengths
    for place, level in zip(places.tolist(), levels, strict=True):
        gap_class, _, gap_width = class_of(coder.gap_to(place, tile))
        level_class, _, width = (RAW, 0, 31) if level == LIMIT else class_of(level)
        yield place, int(lengths[coder.context, gap_class * LEVEL_CLASSES + level_class]) + gap_width + 1 + width
        coder.heard(gap_class, level_class)


def _points(sample: Tensor, index: int) -> tuple[int, int, int]:
    """Where in their intervals the magnitudes of levels 1, 2 and more are in the mean, in 256ths of a step plus 128."""
    step = torch.tensor(step_of(index), dtype=torch.float32)
    relative = sample[sample >= step * THRESHOLD] * (1 / step)
    levels = levels_of(relative)
    places = ((relative - levels) * 256 + 128).clamp(0, 255).long()
    groups = [places[levels == 1], places[levels == 2], places[(levels > 2) & (levels < LIMIT)]]
    first, second, others = (
        min(int(each.sum()) // each.numel(), HIGHEST_POINT) if each.numel() else 128 for each in groups
    )
    return first, second, others
