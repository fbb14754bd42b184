"""Mean magnitudes, and codes of the gaps and levels of what is not zero.

Thirty-two values are compared with the threshold at a time; what follows costs time for those that reach it only.
"""

from __future__ import annotations

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
from gradwire.kernels.cpu._instructions import reaching_mask, store64, trailing_zeros
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
from gradwire.kernels.reference._torch import LANES
from gradwire.kernels.reference.deadzone import HEAD, LARGEST, LIMIT, deadzone_room, scales_of
from gradwire.kernels.reference.deadzone_codes import ESCAPE, LEVEL_CLASSES, RAW, codes
from gradwire.layout import Block, Int64Array, UInt64Array
from gradwire.randomness import run_keys

MOST = 56
"""Bits that fit in eight bytes from any bit of the first one on."""


def deadzone_scales(block: Block, source: Compensated) -> Tensor:
    totals, _ = magnitude_statistics(block, source)
    return from_numpy(scales_of(block, totals))


def deadzone_encode(
    block: Block, values: Tensor, keeps: bool, steps: Tensor, points: tuple[int, int, int], tile: int, payload: Tensor
) -> Flag:
    packed, head = array(payload), 4 * block.segment_count
    edge = packed.size - deadzone_room(block, tile, payload)
    packed[head:] = 0
    packed[:head].view(np.float32)[:] = array(steps)
    packed[head : head + 3] = points
    fits = _encode(
        block.runs,
        block.segments,
        array(values),
        keeps,
        array(steps),
        offsets_of(packed[head : head + 3]),
        tile,
        codes().lengths.reshape(-1),
        codes().words.reshape(-1),
        packed[head + HEAD : edge].view(np.uint32),
        packed[edge:],
    )
    return flag(fits)


def deadzone_dither(block: Block, values: Tensor, steps: Tensor, key: int, out: Tensor) -> None:
    keys = run_keys(key, block.streams)
    _dither(block.runs, block.segments, array(values), array(steps), keys, block.origins, array(out))


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
) -> bool:
    """Whether all had room."""
    room, used, pending = 8 * np.int64(packed.size), np.int64(0), np.uint64(0)
    previous, end, began, base, activity = np.int64(-1), np.int64(tile), np.int64(0), np.int64(0), np.int64(0)
    for segment in range(segments.size - 1):
        step = steps[segment]
        sends = step > 0 and step < np.float32(np.inf)
        inverse, threshold = np.float32(1) / step, threshold_of(step)
        for run in range(segments[segment], segments[segment + 1]):
            start, length = runs[run, 0], runs[run, 1]
            t = values[start : start + length]
            bits = t.view(np.uint32)
            for first in range(0, length if sends else 0, LANES):
                if first + LANES <= length:
                    mask = reaching_mask(t, first, threshold)
                else:
                    mask = np.uint32(0)
                    for i in range(length - first):
                        reaches = np.uint32((bits[first + i] & np.uint32(0x7FFFFFFF)) >= threshold)
                        mask |= reaches << np.uint32(i)
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
                        sent = (np.float32(level) + offsets[point_of(level_class)]) * step
                        sent = signed(min(sent, np.float32(LARGEST)), sign)
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
