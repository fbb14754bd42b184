"""The finest step under which codes have room, by a sample of the values; and values rounded by chance."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels.reference._torch import LANES, flat_runs
from gradwire.kernels.reference.deadzone import LIMIT, THRESHOLD, Coder, class_of, levels_of
from gradwire.kernels.reference.deadzone_codes import LEVEL_CLASSES, RAW, codes
from gradwire.layout import Block, Int64Array
from gradwire.randomness import hash32, run_keys

ALL_SAMPLED = 2**17
"""By all elements the step is chosen if there are no more than that;"""

SAMPLED_ELEMENTS = 2**15
"""of others by so many,"""

SAMPLED_BITS = 2**16
"""or by more, so that their codes take so many bits; by all if these are fewer."""

SAMPLED_CHUNK = 64
"""Consecutive elements that are looked at."""

SPREAD = 0x9E3779B9
"""Of 2**32, by which the place of what is looked at moves on: the golden section, which goes with no length of rows."""

TURNS = 8
"""Choices of what is looked at: what codes of the others take more would be the same in every step by one alone."""

MARGIN = 63 / 64
"""Share of the room that is aimed at where values are rounded by chance, which is drawn anew once the step is known."""

STEPS = 45 * 256
"""Steps to choose from, 256 an octave, from :data:`FINEST` on."""

FEW = 2**13
"""Elements of a sample by which it is guessed which step all of them will ask for."""

FINEST = 2.0**-20
"""Relative to the mean magnitude of a segment."""

HIGHEST_POINT = 204
"""A level stands for at most ``(HIGHEST_POINT - 128) / 256`` of a step more, lest a value be off by more than it is."""


def deadzone_sample(block: Block, values: Tensor, scales: Tensor, room: int, turn: int = 0) -> Tensor:
    """Magnitudes of the :func:`chunks_sampled`, relative to the scale of their segment.

    Args:
        block: Which elements.
        values: ``float32`` flat buffer of compensated values.
        scales: As :func:`deadzone_scales` gave them.
        room: Bits.
        turn: Any number, which says what is looked at.

    Returns:
        ``float32[n]``, 0 where a scale is not positive, and zeros up to a multiple of :data:`LANES`.
    """
    found = []
    for start, count, segment, _ in chunks_sampled(block, room, turn).tolist():
        scale, chunk = scales[segment], values[start : start + count].abs()
        found.append(chunk * (1 / scale) if bool(scale > 0) else torch.zeros_like(chunk))
    sample = torch.cat(found) if found else values.new_empty(0)
    return torch.nn.functional.pad(sample, (0, -len(sample) % LANES))


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
    """The finest step under which codes have room, by a sample of the values.

    By a sample that is not all of them room is aimed at that is two standard errors of its size smaller, but half at
    least. Where that leaves more than half of the room empty, because many values are alike, it is one step finer, and
    the last ones find no room; unless these are so loud that by their squares less would be sent.

    Args:
        block: Which elements.
        sample: As :func:`deadzone_sample` gave it.
        tile: Elements of a tile.
        room: Bits.
        key: Randomness, for values that :func:`deadzone_dither` is to round.
        turn: As :func:`deadzone_sample` took it.
        near: A step that was found for much the same values and room, if there is one: in samples of more than a few
            it is looked for from there on.
        exactly: Whether it is to be the finest; else one near it will do.

    Returns:
        The step, relative to the segments' scales, and the points of levels 1, 2 and more.
    """
    target = room_of_sample(block, room, key is not None, turn)
    drawn = None if key is None else uniform(key, sample.numel(), sample.device)
    few, drawn_of_few = few_of(sample), None if drawn is None else few_of(drawn)
    all_are_few = few.numel() == sample.numel()
    if near is None or all_are_few:
        share = target * few.numel() // max(sample.numel(), 1)
        guess, _ = _finest(few, drawn_of_few, tile, share, STEPS // 2, STEPS)
    else:
        guess = index_of(near)
    size = max(_size(_rounded(sample, guess, drawn), guess, tile), 1)
    alike = target <= 2 * size <= 4 * target
    if not alike:  # those few, or what it was found for, were like few others
        guess, _ = _finest(sample, drawn, tile, target, guess, 1)
        size = max(_size(_rounded(sample, guess, drawn), guess, tile), 1)
    aim = target
    if drawn is None and (every := sampling(block, room)) > 1:
        aim -= min(_doubt(sample, guess, tile, every, target / size), target // 2)
    if alike:
        share = _size(_rounded(few, guess, drawn_of_few), guess, tile) * aim // size
        guess, _ = _finest(few, drawn_of_few, tile, share, guess, 1)
    if exactly or all_are_few or not alike:
        guess, size = _finest(sample, drawn, tile, aim, guess, 1)
        if guess and 2 * size < target:
            finer, longer = (_told(_rounded(sample, each, drawn), each, tile, target) for each in (guess - 1, guess))
            guess -= finer > longer
    return step_of(guess), _points(sample, guess)


def uniform(key: int, count: int, device: torch.device, first: int = 0) -> Tensor:
    """Numbers from 0 to 1, the end not included: ``float32[count]``."""
    return (hash32(key, torch.arange(first, first + count, device=device)) >> 8).float() * 2.0**-24


def sampling(block: Block, room: int) -> int:
    """Of how many chunks one is looked at."""
    if block.numel <= ALL_SAMPLED:
        return 1
    return max(min(-(-block.numel // SAMPLED_ELEMENTS), -(-room // SAMPLED_BITS)), 1)


def chunks_sampled(block: Block, room: int, turn: int = 0) -> Int64Array:
    """``int64[C, 4]``: first element of a chunk that is looked at, number, segment, and elements of those before.

    One of every so many, each time at another place among them. At the same one they would be of rows that have
    something in common: with 256 rows of 512, of every fourth byte's. Kept until fewer or more are asked for.
    """
    every, turn = sampling(block, room), turn % TURNS
    kept = _chunks.setdefault(block, {})
    if turn not in kept or kept[turn][0] != every:
        kept[turn] = every, _one_of(block, every, turn)
    return kept[turn][1]


_chunks: WeakKeyDictionary[Block, dict[int, tuple[int, Int64Array]]] = WeakKeyDictionary()


def _one_of(block: Block, every: int, turn: int) -> Int64Array:
    start, length, _ = block.runs.T
    counts = -(-length // SAMPLED_CHUNK)
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    group = np.arange(-(-total // every))
    number = np.minimum(group * every + (((group * SPREAD + turn * 2**32 // TURNS) % 2**32) * every >> 32), total - 1)
    run = np.searchsorted(ends, number, side="right")
    first = (number - (ends - counts)[run]) * SAMPLED_CHUNK
    taken = np.minimum(SAMPLED_CHUNK, length[run] - first)
    segment = np.searchsorted(block.segments[1:], run, side="right")
    return np.stack((start[run] + first, taken, segment, np.cumsum(taken) - taken), axis=1)


def room_of_sample(block: Block, room: int, drawn: bool, turn: int) -> int:
    """Bits that the codes of a sample may take, of the share of the room that is its own."""
    taken = int(chunks_sampled(block, room, turn)[:, 1].sum())
    share = room * (taken / max(block.numel, 1))
    return int(share * MARGIN) if drawn else room if taken == block.numel else int(share)


def few_of(sample: Tensor) -> Tensor:
    """Some of a sample's chunks, evenly spread, :data:`FEW` elements or somewhat more; all if there are fewer."""
    chunks = sample[: sample.numel() // SAMPLED_CHUNK * SAMPLED_CHUNK].view(-1, SAMPLED_CHUNK)
    every = len(chunks) * SAMPLED_CHUNK // FEW
    return chunks[::every].flatten() if every > 1 else sample


def step_of(index: int) -> float:
    """The float32 so many steps above the finest one, evenly spaced within an octave."""
    first = np.float32(FINEST).view(np.uint32)
    return float(np.uint32(first + (index << 15)).view(np.float32))


def index_of(step: float) -> int:
    """Of one of these float32, which it is."""
    return int(np.float32(step).view(np.uint32) - np.float32(FINEST).view(np.uint32)) >> 15


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


def _finest(sample: Tensor, drawn: Tensor | None, tile: int, target: int, guess: int, reach: int) -> tuple[int, int]:
    """The number of the finest step whose codes take no more, and what they take; or of the longest, and no more.

    Looked for from a guess on, so far from it and each time twice as far, until halving what is left is nearer.
    """
    low, high, least, guess = 0, STEPS, target, min(guess, STEPS - 1)
    while low < high:
        size = _size(_rounded(sample, guess, drawn), guess, tile, target)
        if size <= target:
            high, least = guess, size
            guess = max((low + high) // 2, high - reach)
        else:
            low = guess + 1
            guess = min((low + high) // 2, low + reach - 1)
        reach *= 2
    return low, least


def _size(sample: Tensor, index: int, tile: int, most: int | None = None) -> int:
    """Bits of all codes, or more than ``most``."""
    size = 0
    for _, bits in _sizes(sample, index, tile):
        size += bits
        if most is not None and size > most:
            break
    return size


def _told(sample: Tensor, index: int, tile: int, room: int) -> float:
    """The squares of the values whose codes have room, added up in order."""
    size, total = 0, 0.0
    for place, bits in _sizes(sample, index, tile):
        size += bits
        if size > room:
            break
        total += float(sample[place]) ** 2
    return total


def _doubt(sample: Tensor, index: int, tile: int, every: int, weight: float) -> int:
    """Two standard errors of a sample's size, times the weight, where one chunk of so many is looked at.

    By what chunks that follow one another differ: how sizes change from layer to layer is no chance.
    """
    bits = [0] * -(-sample.numel() // SAMPLED_CHUNK)
    for place, taken in _sizes(sample, index, tile):
        bits[place // SAMPLED_CHUNK] += taken
    squares = sum((after - before) ** 2 for before, after in pairwise(bits))
    return int(weight * math.sqrt(2 * squares * (every - 1) / every))


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
