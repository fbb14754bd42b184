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

from gradwire.deferred import Flag, flag
from gradwire.kernels.compensated import Compensated
from gradwire.kernels.reference._torch import as_bytes, flat_runs
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
from gradwire.kernels.reference.statistics import magnitude_statistics
from gradwire.layout import Block, Float32Array, Float64Array

ROUNDING = 5 / 16
"""What is added to a magnitude in steps before its fraction is cut off."""

THRESHOLD = 1 - ROUNDING

LIMIT = 2**15
"""A magnitude of so many steps is sent as it is."""

SMALLEST_SCALE = 2.0**-118
"""A segment whose magnitudes have a smaller mean is sent as zeros: dividing by it would overflow."""

LARGEST = torch.finfo(torch.float32).max
"""No value is sent as more than this."""

HEAD = 4
"""Bytes after the steps: where levels are in their intervals. Then comes the size of each tile."""

TILE = 2**12
"""Values of a tile; or bits of its room, where values have less than one.

Tiles are read independently of one another, and what a tile sends one code after the other.
"""

LEAST_BODY = 16
"""Bytes of codes that there always are, more than any value takes, so that something is sent in every step."""

MEMORY = 3
"""How much the activity remembers: each value counts as ``2**-MEMORY`` of it."""


def deadzone_scales(block: Block, source: Compensated) -> Tensor:
    """The mean magnitude of each segment's compensated values, which are left in the residual if there is one.

    Returns:
        ``float32[S]``: NaN where a value is not finite, 0 below :data:`SMALLEST_SCALE`.
    """
    totals, _ = magnitude_statistics(block, source)
    return torch.from_numpy(scales_of(block, totals)).to(source.gradient.device)


def scales_of(block: Block, totals: Float64Array) -> Float32Array:
    """Mean magnitudes from the sums of each segment."""
    means = (totals / block.segment_numels).astype(np.float32)
    return np.where(means < SMALLEST_SCALE, np.float32(0), means)


def deadzone_encode(
    block: Block, values: Tensor, keeps: bool, steps: Tensor, points: tuple[int, int, int], tile: int, payload: Tensor
) -> Flag:
    """Writes values until the room is full, and takes what it wrote from them if they are a memory.

    Args:
        block: Which elements.
        values: ``float32`` flat buffer of compensated values.
        keeps: Whether they are the residual.
        steps: ``float32[S]``: the step of each segment, any NaN for one that is not finite; torch's is written.
        points: Of levels.
        tile: Elements of a tile.
        payload: ``uint8[deadzone_payload_bytes]``.

    Returns:
        Whether all had room.
    """
    edge = payload.numel() - deadzone_room(block, tile, payload)
    room, offsets = 8 * (payload.numel() - edge), _offsets(points, values.device)
    coder, base = Coder(), 0
    streams = [""] * tiles_of(block, tile)
    for segment in range(block.segment_count):
        step = steps[segment]
        for _, start, stop, _ in flat_runs(block, segment):
            t = values[start:stop]
            if bool(step > 0) and bool(step.isfinite()):
                magnitudes, inverse = t.abs(), 1 / step
                places = (magnitudes >= step * THRESHOLD).nonzero()[:, 0]
                levels = levels_of(magnitudes[places] * inverse)
                sent = _sent(levels, offsets, step, t[places])
                for place, level, value, stands_for in zip(
                    places.tolist(), levels.tolist(), t[places], sent, strict=True
                ):
                    gap = coder.gap_to(base + place, tile)
                    told = coder.told(gap, level, value)
                    room -= len(told)
                    if room < 0:
                        break
                    streams[(base + place) // tile] += told
                    if keeps:
                        t[place] -= stands_for
            base += stop - start
    bits = np.array([int(bit) for bit in "".join(streams)], np.uint8)
    payload.zero_()
    payload[: 4 * block.segment_count] = as_bytes(steps.masked_fill(steps.isnan(), torch.nan))
    payload[4 * block.segment_count :][:3] = torch.tensor(points, dtype=torch.uint8)
    payload[4 * block.segment_count + HEAD : edge] = as_bytes(torch.tensor([*map(len, streams)], dtype=torch.int32))
    packed = torch.from_numpy(np.packbits(bits, bitorder="little"))
    payload[edge : edge + packed.numel()] = packed
    return flag(room >= 0)


def deadzone_decode(block: Block, payloads: Tensor, tile: int, out: Tensor, weight: float) -> None:
    """``out = weight * sum of what was sent``, summed in row order; whatever the bytes are.

    Codes go on with zeros where the payload ends, and end with the last element of their tile.
    """
    total = torch.zeros(block.numel, dtype=torch.float32, device=out.device)
    for payload in payloads.cpu():  # which is read bit by bit
        total = total + _read(block, payload, tile).to(out.device)
    base = 0
    for start, length, _ in block.runs.tolist():
        out[start : start + length] = total[base : base + length] * weight
        base += length


def deadzone_tile(bits: float) -> int:
    """Elements of a tile: :data:`TILE`, or the largest power of two whose room is no more than so many bits."""
    return 1 << int(math.log2(TILE / min(bits, 1)))


def deadzone_payload_bytes(block: Block, tile: int, bits: float) -> int:
    """Steps, head, and ``bits`` for each element in whole words: a word a tile, and at least :data:`LEAST_BODY`."""
    tiles = 4 * tiles_of(block, tile)
    return 4 * block.segment_count + HEAD + max(tiles + LEAST_BODY, 4 * int(np.ceil(bits * block.numel / 32)))


def deadzone_room(block: Block, tile: int, payload: Tensor) -> int:
    """Bytes of codes in a payload."""
    return payload.numel() - 4 * block.segment_count - HEAD - 4 * tiles_of(block, tile)


def tiles_of(block: Block, tile: int) -> int:
    """Number of tiles."""
    return -(-block.numel // tile)


@dataclass
class Coder:
    """What both sides know of the values before in a tile.

    Attributes:
        activity: The mean difference of the classes of levels and gaps, in 64ths.
        previous: The place of the last one.
    """

    activity: int = 0
    previous: int = -1

    @property
    def context(self) -> int:
        """Which code the next value has."""
        return min(max((self.activity >> 6) - QUIETEST, 0), CONTEXTS - 1)

    def heard(self, gap_class: int, level_class: int) -> None:
        """The activity follows a value."""
        self.activity += ((level_class - gap_class) * 64 - self.activity) >> MEMORY

    def gap_to(self, place: int, tile: int) -> int:
        """The distance from the value before; the first one in a tile has only the tile's start before it."""
        if (first := place // tile * tile) > self.previous:
            self.activity, self.previous = 0, first - 1
        gap, self.previous = place - self.previous, place
        return gap

    def told(self, gap: int, level: int, value: Tensor) -> str:
        """The bits of a value, the first one first; the activity follows."""
        gap_class, gap_low, gap_width = class_of(gap)
        level_class, low, width = (RAW, 0, 0) if level == LIMIT else class_of(level)
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


def class_of(number: int) -> tuple[int, int, int]:
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


def levels_of(relative: Tensor) -> Tensor:
    """Of magnitudes in steps that reach the threshold: ``int64``."""
    return (relative + ROUNDING).clamp(1, LIMIT).long()


def _offsets(points: tuple[int, int, int], device: torch.device) -> Tensor:
    return (torch.tensor(points, dtype=torch.float32, device=device) - 128) / 256


def _sent(levels: Tensor, offsets: Tensor, step: Tensor, values: Tensor) -> Tensor:
    """What levels stand for."""
    relative = levels.float() + offsets[(levels - 1).clamp(0, 2)]
    coarse = torch.where(values < 0, -1.0, 1.0) * (relative * step).clamp(max=LARGEST)
    return torch.where(levels == LIMIT, values, coarse)


def _read(block: Block, payload: Tensor, tile: int) -> Tensor:
    """What a payload on the CPU stands for: ``float32[numel]``."""
    words = payload.clone().view(torch.int32)
    head = block.segment_count + HEAD // 4
    steps = words[: block.segment_count].view(torch.float32)
    offsets = _offsets(tuple(payload[4 * head - HEAD : 4 * head - 1].tolist()), payload.device)
    sizes = words[head : head + tiles_of(block, tile)].tolist()
    content = bytes(payload[4 * (head + len(sizes)) :].tolist())
    step_of_element = steps.repeat_interleave(torch.from_numpy(block.segment_numels))
    found, start = torch.zeros(block.numel, dtype=torch.float32), 0
    for number, size in enumerate(sizes):
        first = number * tile
        stop = start + (size & 0xFFFFFFFF)
        _read_tile(_Stream(content, start, stop), step_of_element[first : first + tile], offsets, found[first:])
        start = stop
    return torch.where(step_of_element.isnan(), torch.nan, found)


def _read_tile(stream: _Stream, steps: Tensor, offsets: Tensor, found: Tensor) -> None:
    """Values of a tile, until its codes or its elements end."""
    coder, place = Coder(), -1
    places, levels, signs, raw = [], [], [], {}
    while stream.at < stream.stop:
        entry = int(codes().symbols[coder.context, stream.peek(LONGEST)])
        symbol = entry & (1 << LONGEST) - 1
        stream.take(entry >> LONGEST)
        if symbol == ESCAPE:
            symbol = stream.take(ESCAPED_BITS)
        gap_class, level_class = symbol // LEVEL_CLASSES, symbol % LEVEL_CLASSES
        coder.heard(gap_class, level_class)
        first, width = first_of(gap_class)
        place += first + stream.take(width)
        if place >= len(steps):
            break
        if level_class == RAW:
            raw[place] = stream.take(32)
            continue
        places.append(place)
        signs.append(-1.0 if stream.take(1) else 1.0)
        first, width = first_of(level_class)
        levels.append(first + stream.take(width))
    level = torch.tensor(levels, dtype=torch.int64)
    relative = level.float() + offsets[(level - 1).clamp(max=2)]
    found[places] = torch.tensor(signs, dtype=torch.float32) * (relative * steps[places]).clamp(max=LARGEST)
    found[list(raw)] = torch.tensor(list(raw.values()), dtype=torch.int64).to(torch.int32).view(torch.float32)


@dataclass
class _Stream:
    """Bits, the lowest one next, and zeros after them.

    Attributes:
        content: All bytes of a payload's codes.
        at: The next one.
        stop: Where the codes of a tile end.
    """

    content: bytes
    at: int
    stop: int

    def peek(self, width: int) -> int:
        first, low = divmod(self.at, 8)
        found = int.from_bytes(self.content[first : first + (low + width + 7) // 8], "little")
        return found >> low & (1 << width) - 1

    def take(self, width: int) -> int:
        taken = self.peek(width)
        self.at += width
        return taken
