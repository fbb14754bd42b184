"""Mean magnitudes, and codes of the gaps and levels of what is not zero.

Thirty-two values are compared with the threshold at a time; what follows costs time for those that reach it only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor, from_numpy

from gradwire.deferred import Flag, flag
from gradwire.kernels.compensated import Compensated
from gradwire.kernels.cpu._compiled import (
    Float32Array,
    UInt8Array,
    UInt32Array,
    array,
    compiled,
    halves,
    hash32,
    inlined,
)
from gradwire.kernels.cpu._instructions import load64, reaching_mask, store64, trailing_zeros
from gradwire.kernels.cpu._levels import (
    class_of,
    context_of,
    following,
    level_of,
    low_bits,
    offsets_of,
    point_of,
    signed,
    threshold_of,
)
from gradwire.kernels.cpu.statistics import magnitude_statistics
from gradwire.kernels.parts import Part, at_once, of_runs, of_tiles, side_by_side
from gradwire.kernels.reference._torch import LANES
from gradwire.kernels.reference.deadzone import HEAD, LARGEST, LIMIT, deadzone_room, scales_of, tiles_of
from gradwire.kernels.reference.deadzone_codes import ESCAPE, LEVEL_CLASSES, RAW, codes
from gradwire.layout import Block, Int64Array, UInt64Array
from gradwire.randomness import run_keys

MOST = 56
"""Bits that fit in eight bytes from any bit of the first one on."""

SPARE = 8
"""Bytes after a body, so that eight can be read from any of its own."""


def deadzone_scales(block: Block, source: Compensated) -> Tensor:
    totals, _ = magnitude_statistics(block, source)
    return from_numpy(scales_of(block, totals))


def deadzone_encode(
    block: Block, values: Tensor, keeps: bool, steps: Tensor, points: tuple[int, int, int], tile: int, payload: Tensor
) -> Flag:
    packed, head = array(payload), 4 * block.segment_count
    edge = packed.size - deadzone_room(block, tile, payload)
    packed[head:] = 0
    packed[:head].view(np.float32)[:] = np.where(np.isnan(array(steps)), np.float32(np.nan), array(steps))
    packed[head : head + 3] = points
    given = _Given(array(values), array(steps), offsets_of(packed[head : head + 3]), tile)
    sizes, parts = packed[head + HEAD : edge].view(np.uint32), of_tiles(block, tile)
    if at_once(block.numel) > 1:
        return flag(_encode_side_by_side(parts, given, keeps, sizes, packed[edge:]))
    return flag(_encode_part(parts[0], given, keeps, sizes, packed[edge:], np.int64(0), np.uint64(0)))


class _Given(NamedTuple):
    values: Float32Array
    steps: Float32Array
    offsets: Float32Array
    tile: int


def _encode_side_by_side(
    parts: Sequence[Part], given: _Given, keeps: bool, sizes: UInt32Array, packed: UInt8Array
) -> bool:
    """Each part's codes are written to a place of their own, and then to where those before end."""

    def put_aside(part: Part) -> UInt8Array | None:
        body = np.empty(packed.size + SPARE, np.uint8)
        fits = _encode_part(part, given, False, sizes, body[:-SPARE], np.int64(0), np.uint64(0))
        return body if fits else None

    def leave(part: Part) -> None:
        runs, segments = part.block.runs, part.block.segments
        _leave(runs, segments, given.values, given.steps[part.segment :], given.offsets)

    room, used, pending, fitting = 8 * packed.size, np.int64(0), np.uint64(0), 0
    for part, body in zip(parts, side_by_side(put_aside, parts), strict=True):
        bits = int(_tiles_of(part, given, sizes).sum())
        if body is None or used + bits > room:
            break
        pending = np.uint64(_append(body, np.int64(bits), packed, used, pending))
        used, fitting = np.int64(used + bits), fitting + 1
    if keeps:
        side_by_side(leave, parts[:fitting])
    if fitting == len(parts):
        return True
    sizes[parts[fitting].element // given.tile :] = 0
    return _encode_part(parts[fitting], given, keeps, sizes, packed, used, pending)


def _encode_part(
    part: Part,
    given: _Given,
    keeps: bool,
    sizes: UInt32Array,
    packed: UInt8Array,
    used: np.int64,
    pending: np.uint64,
) -> bool:
    runs, segments, steps = part.block.runs, part.block.segments, given.steps[part.segment :]
    book, tiles = (codes().lengths.reshape(-1), codes().words.reshape(-1)), _tiles_of(part, given, sizes)
    offsets, tile = given.offsets, given.tile
    fits = _encode(runs, segments, given.values, keeps, steps, offsets, tile, *book, tiles, packed, used, pending)
    return bool(fits)


def _tiles_of(part: Part, given: _Given, sizes: UInt32Array) -> UInt32Array:
    first = part.element // given.tile
    return sizes[first : first + tiles_of(part.block, given.tile)]


def deadzone_dither(block: Block, values: Tensor, steps: Tensor, key: int, out: Tensor) -> None:
    given, of_segments, target = array(values), array(steps), array(out)

    def dither(part: Part) -> None:
        own, keys = part.block, run_keys(key, part.block.streams)
        _dither(own.runs, own.segments, given, of_segments[part.segment :], keys, own.origins, target)

    side_by_side(dither, of_runs(block))


@compiled
def _encode(
    runs: Int64Array,
    segments: Int64Array,
    values: Float32Array,
    keeps: bool,
    steps: Float32Array,
    offsets: Float32Array,
    tile: int,
    lengths: UInt8Array,
    codewords: UInt32Array,
    sizes: UInt32Array,
    packed: UInt8Array,
    used: np.int64,
    pending: np.uint64,
) -> bool:
    """Whether all had room after the bits used, of which some are pending."""
    room, began = 8 * np.int64(packed.size), used
    previous, end, base, activity = np.int64(-1), np.int64(tile), np.int64(0), np.int64(0)
    for segment in range(segments.size - 1):
        step = steps[segment]
        sends = step > 0 and step < np.float32(np.inf)
        inverse, threshold = np.float32(1) / step, threshold_of(step)
        for run in range(segments[segment], segments[segment + 1]):
            start, length = runs[run, 0], runs[run, 1]
            t = values[start : start + length]
            bits = t.view(np.uint32)
            for first in range(0, length if sends else 0, LANES):
                mask = _reaching(t, first, threshold)
                while mask:
                    place = first + trailing_zeros(mask)
                    mask &= mask - np.uint32(1)
                    value = t[place]
                    level = level_of(abs(value) * inverse)
                    if base + place >= end:
                        sizes[(end - 1) // tile] = used - began
                        previous = (base + place) // tile * tile - 1
                        end, began, activity = previous + 1 + tile, used, np.int64(0)
                    gap = base + place - previous
                    gap_class = class_of(gap)
                    gap_width = low_bits(gap_class)
                    level_class = np.int64(RAW) if level == LIMIT else class_of(level)
                    symbol = np.uint64(gap_class * LEVEL_CLASSES + level_class)
                    symbol += np.uint64(context_of(activity)) * np.uint64(ESCAPE + 1)
                    code, width = np.uint64(codewords[symbol]), np.int64(lengths[symbol])
                    if level == LIMIT:
                        rest, rest_width = np.uint64(bits[place]), np.int64(32)
                        sent = value
                    else:
                        rest_width = low_bits(level_class) + 1
                        low = level & ((np.int64(1) << (rest_width - 1)) - 1)
                        sign = np.uint64(bits[place] >> np.uint32(31))
                        rest = np.uint64(2 * low) | sign
                        sent = _sent(level, level_class, sign, step, offsets)
                    code |= np.uint64(gap & ((np.int64(1) << gap_width) - 1)) << np.uint64(width)
                    width += gap_width
                    if used + width + rest_width > room:
                        sizes[(end - 1) // tile] = used - began
                        return False
                    if width + rest_width > MOST:
                        pending = _put(packed, used, pending, code, width)
                        used += width
                        code, width = rest, rest_width
                    else:
                        code |= rest << np.uint64(width)
                        width += rest_width
                    pending = _put(packed, used, pending, code, width)
                    used += width
                    if keeps:
                        t[place] = value - sent
                    activity = following(activity, gap_class, level_class)
                    previous = base + place
            base += length
    if sizes.size:
        sizes[(end - 1) // tile] = used - began
    return True


@inlined
def _sent(
    level: np.int64, level_class: np.int64, sign: np.uint64, step: np.float32, offsets: Float32Array
) -> np.float32:
    """What a level stands for."""
    magnitude = (np.float32(level) + offsets[point_of(level_class)]) * step
    return np.float32(signed(min(magnitude, np.float32(LARGEST)), sign))


@compiled
def _leave(
    runs: Int64Array, segments: Int64Array, values: Float32Array, steps: Float32Array, offsets: Float32Array
) -> None:
    """Takes what all codes stand for from the values."""
    for segment in range(segments.size - 1):
        step = steps[segment]
        if not (step > 0 and step < np.float32(np.inf)):
            continue
        inverse, threshold = np.float32(1) / step, threshold_of(step)
        for run in range(segments[segment], segments[segment + 1]):
            start, length = runs[run, 0], runs[run, 1]
            t = values[start : start + length]
            bits = t.view(np.uint32)
            for first in range(0, length, LANES):
                mask = _reaching(t, first, threshold)
                while mask:
                    place = first + trailing_zeros(mask)
                    mask &= mask - np.uint32(1)
                    level = level_of(abs(t[place]) * inverse)
                    sign = np.uint64(bits[place] >> np.uint32(31))
                    sent = t[place] if level == LIMIT else _sent(level, class_of(level), sign, step, offsets)
                    t[place] -= sent


@inlined
def _reaching(t: Float32Array, first: np.int64, threshold: np.uint32) -> np.uint32:
    """Which of the values from ``first`` on are sent, of as many as there are lanes."""
    if first + LANES <= t.size:
        return np.uint32(reaching_mask(t, first, threshold))
    mask, bits = np.uint32(0), t.view(np.uint32)
    for i in range(t.size - first):
        reaches = np.uint32((bits[first + i] & np.uint32(0x7FFFFFFF)) >= threshold)
        mask |= reaches << np.uint32(i)
    return mask


@compiled
def _append(body: UInt8Array, bits: np.int64, packed: UInt8Array, used: np.int64, pending: np.uint64) -> np.uint64:
    """Writes so many bits of a body after those used; returns those that are pending then."""
    for first in range(0, bits, MOST):
        width = min(bits - first, np.int64(MOST))
        code = load64(body, first >> 3) & ((np.uint64(1) << np.uint64(width)) - np.uint64(1))
        pending = _put(packed, used + first, pending, code, width)
    return pending


@inlined
def _put(packed: UInt8Array, at: np.int64, pending: np.uint64, code: np.uint64, width: np.int64) -> np.uint64:
    """Writes up to :data:`MOST` bits after the pending ones of a byte; returns those that are pending then."""
    first, filled = at >> 3, at & 7
    pending |= code << np.uint64(filled)
    if first + 8 <= packed.size:
        store64(packed, first, pending)
    else:
        for i in range(packed.size - first):
            packed[first + i] = np.uint8(pending >> np.uint64(8 * i) & np.uint64(255))
    return pending >> np.uint64(filled + width & ~7)


@compiled
def _dither(
    runs: Int64Array,
    segments: Int64Array,
    values: Float32Array,
    steps: Float32Array,
    keys: UInt64Array,
    origins: Int64Array,
    out: Float32Array,
) -> None:
    for segment in range(segments.size - 1):
        step = steps[segment]
        inverse = np.float32(1) / step
        for run in range(segments[segment], segments[segment + 1]):
            first, last = runs[run, 0], runs[run, 0] + runs[run, 1]
            t, rounded = values[first:last], out[first:last]
            low, high = halves(keys[run])
            origin = np.uint32(origins[run])
            if not (step > 0 and step < np.float32(np.inf)):
                rounded[:] = np.float32(0)
                continue
            for i in range(t.size):
                relative = abs(t[i]) * inverse
                drawn = np.float32(hash32(low, high, np.uint32(origin + np.uint32(i))) >> np.uint32(8))
                level = np.floor(relative + drawn * np.float32(2.0**-24)) * step
                level = -level if t[i] < 0 else level
                rounded[i] = level if relative < np.float32(LIMIT) else t[i]
