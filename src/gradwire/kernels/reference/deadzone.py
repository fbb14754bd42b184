"""A dead-zone quantiser with one step, and codes of fixed length tables for the gaps and levels of what is not zero.

A value that reaches :data:`THRESHOLD` steps has a level, its magnitude in steps rounded; the others are zeros. A symbol
is the class of the distance from the value before and that of the level, under a code that follows from how active the
values before were: in a gradient the large ones lie close together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels.reference._torch import as_bytes, flat_runs, keep, pieces_of, run_total
from gradwire.kernels.reference.deadzone_codes import (
    CONTEXTS,
    ESCAPE,
    ESCAPED_BITS,
    LEVEL_CLASSES,
    LONGEST,
    QUIETEST,
    RAW,
    codes,
)
from gradwire.layout import Block

ROUNDING = 5 / 16
"""What is added to a magnitude in steps before its fraction is cut off."""

THRESHOLD = 1 - ROUNDING

LIMIT = 2**15
"""A magnitude of so many steps is sent as it is."""

SMALLEST_SCALE = 2.0**-118
"""A segment whose magnitudes have a smaller mean is sent as zeros: dividing by it would overflow."""

LARGEST = torch.finfo(torch.float32).max
"""No value is sent as more than this."""

HEAD = 8
"""Bytes between the steps and the codes: how many values have one, and where levels are in their intervals."""

LEAST_BODY = 16
"""Bytes of codes that there always are, more than any value takes, so that something is sent in every step."""

SAMPLED_ELEMENTS = 2**18
"""By so many elements the step is chosen,"""

SAMPLED_BITS = 2**16
"""or by more, so that their codes take so many bits; by all if there are fewer, or not so many bits."""

SAMPLED_CHUNK = 256
"""Consecutive elements that are looked at."""

MARGIN = 63 / 64
"""Share of the room that is aimed at where not all elements were looked at."""

STEPS = 45 * 256
"""Steps to choose from, 256 an octave, from :data:`FINEST` on."""

FINEST = 2.0**-20
"""Relative to the mean magnitude of a segment."""

HIGHEST_POINT = 204
"""A level stands for at most ``(HIGHEST_POINT - 128) / 256`` of a step more, lest a value be off by more than it is."""

MEMORY = 3
"""How much the activity remembers: each value counts as ``2**-MEMORY`` of it."""


def deadzone_scales(block: Block, gradient: Tensor, residual: Tensor | None, beta: float, gamma: float) -> Tensor:
    """The mean magnitude of each segment's compensated values, which are left in the residual if there is one.

    Returns:
        ``float32[S]``: NaN where a value is not finite, 0 below :data:`SMALLEST_SCALE`.
    """
    scales = []
    for segment in range(block.segment_count):
        pieces = pieces_of(block, segment, gradient, residual, beta, gamma)
        mean = sum(run_total(piece.t.double().abs()) for piece in pieces) / sum(piece.t.numel() for piece in pieces)
        for piece in pieces:
            keep(piece.memory, piece.t)
        scales.append(torch.nan if not math.isfinite(mean) else mean)
    found = torch.tensor(scales, dtype=torch.float32)
    return torch.where(found < SMALLEST_SCALE, 0.0, found)


def deadzone_step(block: Block, values: Tensor, scales: Tensor, room: int) -> tuple[float, tuple[int, int, int]]:
    """The finest step under which codes have room, by a sample of the values.

    Where that leaves more than half of the room empty, because many values are alike, it is one step finer, and the
    last ones find no room.

    Args:
        block: Which elements.
        values: ``float32`` flat buffer of compensated values.
        scales: As :func:`deadzone_scales` gave them.
        room: Bits.

    Returns:
        The step, relative to the segments' scales, and the points of levels 1, 2 and more.
    """
    sample, share = _sample(block, values, scales, sampling(block, room))
    target = room if share == 1 else int(room * share * MARGIN)
    low, high = 0, STEPS
    while low < high:
        middle = (low + high) // 2
        if _size(sample, middle, target) <= target:
            high = middle
        else:
            low = middle + 1
    if low and 2 * _size(sample, low, target) < target:
        low -= 1
    return step_of(low), _points(sample, low)


def sampling(block: Block, room: int) -> int:
    """Of how many chunks one is looked at."""
    return max(min(-(-block.numel // SAMPLED_ELEMENTS), -(-room // SAMPLED_BITS)), 1)


def step_of(index: int) -> float:
    """The float32 so many steps above the finest one, evenly spaced within an octave."""
    first = np.float32(FINEST).view(np.uint32)
    return float(np.uint32(first + (index << 15)).view(np.float32))


def deadzone_encode(
    block: Block, values: Tensor, keeps: bool, steps: Tensor, points: tuple[int, int, int], payload: Tensor
) -> None:
    """Writes values until the room is full, and takes what it wrote from them if they are a memory.

    Args:
        block: Which elements.
        values: ``float32`` flat buffer of compensated values.
        keeps: Whether they are the residual.
        steps: ``float32[S]``: the step of each segment, NaN for one that is not finite.
        points: Of levels.
        payload: ``uint8[deadzone_payload_bytes]``.
    """
    edge = 4 * block.segment_count + HEAD
    room, offsets = 8 * deadzone_room(block, payload), _offsets(points)
    writer, previous, base, used, count = _Coder(), -1, 0, 0, 0
    stream: list[str] = []
    for segment in range(block.segment_count):
        step = steps[segment]
        for _, start, stop, _ in flat_runs(block, segment):
            t = values[start:stop]
            if bool(step > 0) and bool(step.isfinite()):
                magnitudes, inverse = t.abs(), 1 / step
                places = (magnitudes >= step * THRESHOLD).nonzero()[:, 0]
                levels = _levels(magnitudes[places] * inverse)
                sent = _sent(levels, offsets, step, t[places])
                for place, level, value, stands_for in zip(
                    places.tolist(), levels.tolist(), t[places], sent, strict=True
                ):
                    told = writer.told(base + place - previous, level, value)
                    if used + len(told) > room:
                        break
                    stream.append(told)
                    used, previous, count = used + len(told), base + place, count + 1
                    if keeps:
                        t[place] -= stands_for
                else:
                    base += stop - start
                    continue
                room = used
            base += stop - start
    bits = np.array([int(bit) for bit in "".join(stream)], np.uint8)
    payload.zero_()
    payload[: edge - HEAD] = as_bytes(steps)
    payload[edge - HEAD : edge - 4].view(torch.int32).fill_(count)
    payload[edge - 4 : edge - 1] = torch.tensor(points, dtype=torch.uint8)
    packed = torch.from_numpy(np.packbits(bits, bitorder="little"))
    payload[edge : edge + packed.numel()] = packed


def deadzone_decode(block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
    """``out = weight * sum of what was sent``, summed in row order; whatever the bytes are.

    Codes go on with zeros where the payload ends, and end with the last element.
    """
    total = torch.zeros(block.numel, dtype=torch.float32)
    for payload in payloads:
        total = total + _read(block, payload)
    base = 0
    for start, length, _ in block.runs.tolist():
        out[start : start + length] = total[base : base + length] * weight
        base += length


def deadzone_payload_bytes(block: Block, bits: float) -> int:
    """Steps, head, and ``bits`` for each element in whole words, at least :data:`LEAST_BODY`."""
    return 4 * block.segment_count + HEAD + max(LEAST_BODY, 4 * int(np.ceil(bits * block.numel / 32)))


def deadzone_room(block: Block, payload: Tensor) -> int:
    """Bytes of codes in a payload."""
    return payload.numel() - 4 * block.segment_count - HEAD


@dataclass
class _Coder:
    """What both sides know of the values before.

    Attributes:
        activity: The mean difference of the classes of levels and gaps, in 64ths.
    """

    activity: int = 0

    @property
    def context(self) -> int:
        return min(max((self.activity >> 6) - QUIETEST, 0), CONTEXTS - 1)

    def heard(self, gap_class: int, level_class: int) -> None:
        self.activity += ((level_class - gap_class) * 64 - self.activity) >> MEMORY

    def told(self, gap: int, level: int, value: Tensor) -> str:
        """The bits of a value, the first one first; the activity follows."""
        gap_class, gap_low, gap_width = _class_of(gap)
        level_class, low, width = (RAW, 0, 0) if level == LIMIT else _class_of(level)
        symbol = gap_class * LEVEL_CLASSES + level_class
        word, length = int(codes().words[self.context, symbol]), int(codes().lengths[self.context, symbol])
        self.heard(gap_class, level_class)
        rest = (
            _bits(int(value.view(torch.int32)) & 0xFFFFFFFF, 32)
            if level == LIMIT
            else _bits(int(value < 0), 1) + _bits(low, width)
        )
        return _bits(word, length) + _bits(gap_low, gap_width) + rest


def _bits(number: int, width: int) -> str:
    return f"{number:0{width}b}"[::-1] if width else ""


def _class_of(number: int) -> tuple[int, int, int]:
    """Two classes an octave: which one, how far from its first number, and in how many bits that is."""
    exponent = number.bit_length() - 1
    width = max(exponent - 1, 0)
    found = max(2 * exponent - 1 + (number >> width & 1), 0) if exponent else 0
    return found, number & ((1 << width) - 1), width


def first_of(number: int) -> tuple[int, int]:
    """The first number of a class, and how many bits say which one it is."""
    exponent = (number + 1) // 2
    width = max(exponent - 1, 0)
    return ((2 + (number + 1) % 2) << width if number else 1), width


def _sample(block: Block, values: Tensor, scales: Tensor, stride: int) -> tuple[Tensor, float]:
    """Magnitudes relative to their segment's scale, and which share of all they are."""
    found, number = [], 0
    for segment in range(block.segment_count):
        scale = scales[segment]
        for _, start, stop, _ in flat_runs(block, segment):
            for first in range(start, stop, SAMPLED_CHUNK):
                if number % stride == 0:
                    chunk = values[first : min(first + SAMPLED_CHUNK, stop)].abs()
                    found.append(chunk * (1 / scale) if bool(scale > 0) else torch.zeros_like(chunk))
                number += 1
    sample = torch.cat(found) if found else torch.empty(0, dtype=torch.float32)
    return sample, sample.numel() / max(block.numel, 1)


def _size(sample: Tensor, index: int, most: int) -> int:
    """Bits of all codes, or more than ``most``."""
    step = torch.tensor(step_of(index), dtype=torch.float32)
    places = (sample >= step * THRESHOLD).nonzero()[:, 0]
    levels = _levels(sample[places] * (1 / step)).tolist()
    coder, previous, size, lengths = _Coder(), -1, 0, codes().lengths
    for place, level in zip(places.tolist(), levels, strict=True):
        gap_class, _, gap_width = _class_of(place - previous)
        level_class, _, width = (RAW, 0, 31) if level == LIMIT else _class_of(level)
        size += int(lengths[coder.context, gap_class * LEVEL_CLASSES + level_class]) + gap_width + 1 + width
        coder.heard(gap_class, level_class)
        previous = place
        if size > most:
            break
    return size


def _points(sample: Tensor, index: int) -> tuple[int, int, int]:
    """Where in their intervals the magnitudes of levels 1, 2 and more are in the mean, in 256ths of a step plus 128."""
    step = torch.tensor(step_of(index), dtype=torch.float32)
    relative = sample[sample >= step * THRESHOLD] * (1 / step)
    levels = _levels(relative)
    places = ((relative - levels) * 256 + 128).clamp(0, 255).long()
    groups = [places[levels == 1], places[levels == 2], places[(levels > 2) & (levels < LIMIT)]]
    first, second, others = (
        min(int(each.sum()) // each.numel(), HIGHEST_POINT) if each.numel() else 128 for each in groups
    )
    return first, second, others


def _levels(relative: Tensor) -> Tensor:
    """Of magnitudes in steps that reach the threshold: ``int64``."""
    return (relative + ROUNDING).clamp(1, LIMIT).long()


def _offsets(points: tuple[int, int, int]) -> Tensor:
    return (torch.tensor(points, dtype=torch.float32) - 128) / 256


def _sent(levels: Tensor, offsets: Tensor, step: Tensor, values: Tensor) -> Tensor:
    """What levels stand for."""
    relative = levels.float() + offsets[(levels - 1).clamp(0, 2)]
    coarse = torch.where(values < 0, -1.0, 1.0) * (relative * step).clamp(max=LARGEST)
    return torch.where(levels == LIMIT, values, coarse)


def _read(block: Block, payload: Tensor) -> Tensor:
    """What a payload stands for: ``float32[numel]``."""
    edge = 4 * block.segment_count + HEAD
    steps = payload[: edge - HEAD].clone().view(torch.float32)
    count = int(payload[edge - HEAD : edge - 4].clone().view(torch.int32)) & 0xFFFFFFFF
    offsets = _offsets(tuple(payload[edge - 4 : edge - 1].tolist()))
    stream, coder = _Stream(int.from_bytes(bytes(payload[edge:].tolist()), "little")), _Coder()
    found = torch.zeros(block.numel, dtype=torch.float32)
    step_of_element = steps.repeat_interleave(torch.from_numpy(block.segment_numels))
    place = -1
    for _ in range(min(count, block.numel)):
        entry = int(codes().symbols[coder.context, stream.peek(LONGEST)])
        symbol = entry & (1 << LONGEST) - 1
        stream.take(entry >> LONGEST)
        if symbol == ESCAPE:
            symbol = stream.take(ESCAPED_BITS)
        gap_class, level_class = symbol // LEVEL_CLASSES, symbol % LEVEL_CLASSES
        coder.heard(gap_class, level_class)
        first, width = first_of(gap_class)
        place += first + stream.take(width)
        if level_class == RAW:
            value = torch.tensor(stream.take(32)).to(torch.int32).view(torch.float32)
        else:
            sign = -1.0 if stream.take(1) else 1.0
            first, width = first_of(level_class)
            level = torch.tensor(first + stream.take(width))
            step = step_of_element[place] if place < block.numel else torch.tensor(0.0, dtype=torch.float32)
            value = sign * ((level.float() + offsets[min(int(level) - 1, 2)]) * step).clamp(max=LARGEST)
        if place >= block.numel:
            break
        found[place] = value
    return torch.where(step_of_element.isnan(), torch.nan, found)


@dataclass
class _Stream:
    """Bits, the lowest one next, and zeros after them."""

    rest: int

    def peek(self, width: int) -> int:
        return self.rest & (1 << width) - 1

    def take(self, width: int) -> int:
        taken = self.peek(width)
        self.rest >>= width
        return taken
