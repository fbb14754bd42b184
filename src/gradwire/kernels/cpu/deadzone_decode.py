"""Reads codes of gaps and levels.

Payloads are decoded side by side, a chunk of elements after the other, so that the output is written once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from gradwire.kernels.cpu._compiled import Float32Array, UInt32Array, array, compiled, inlined, rows_of_bytes
from gradwire.kernels.cpu._levels import context_of, following, offsets_of
from gradwire.kernels.reference._torch import CHUNK
from gradwire.kernels.reference.deadzone import HEAD, LARGEST, first_of
from gradwire.kernels.reference.deadzone_codes import (
    ESCAPE,
    ESCAPED_BITS,
    LEVEL_BITS,
    LEVEL_CLASSES,
    LONGEST,
    RAW,
    codes,
)
from gradwire.layout import Block, Int64Array

UInt16Array = np.ndarray[Any, np.dtype[np.uint16]]

_CLASSES = np.array([first_of(number) for number in range(64)], np.int64)
"""The first number of each class, and the bits that follow."""


def deadzone_decode(block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
    packed, stride = rows_of_bytes(payloads)
    count = len(payloads)
    offsets, body = np.empty((count, 3), np.float32), 4 * block.segment_count + HEAD
    for row in range(count):
        offsets[row] = offsets_of(packed[row * stride + body - 4 : row * stride + body - 1])
    _decode(
        block.runs,
        block.segments,
        packed.view(np.uint32),
        stride // 4,
        payloads.shape[1] // 4,
        offsets,
        codes().symbols,
        _CLASSES,
        array(out),
        np.float32(weight),
        np.zeros((count, 5), np.int64),
        np.zeros(count, np.float32),
        np.empty(CHUNK, np.float32),
    )


@compiled
def _decode(
    runs: Int64Array,
    segments: Int64Array,
    words: UInt32Array,
    stride: int,
    size: int,
    offsets: Float32Array,
    symbols: UInt16Array,
    classes: Int64Array,
    out: Float32Array,
    weight: np.float32,
    states: Int64Array,
    raw_of: Float32Array,
    t: Float32Array,
) -> None:
    """A row's state: its next bit, values left, activity, and place and level of the value that waits."""
    head, base, end = segments.size - 1, np.int64(0), np.int64(0)
    for run in range(len(runs)):
        end += runs[run, 1]
    for row in range(len(states)):
        states[row, 0], states[row, 1] = 32 * (row * stride + head + 2), np.int64(words[row * stride + head])
        states[row, 3] = -1
    for segment in range(segments.size - 1):
        for run in range(segments[segment], segments[segment + 1]):
            start, length = runs[run, 0], runs[run, 1]
            for first in range(0, length, CHUNK):
                numel = min(CHUNK, length - first)
                t[:numel] = 0
                for row in range(len(states)):
                    step = words[row * stride + segment : row * stride + segment + 1].view(np.float32)[0]
                    if step != step:
                        t[:numel] = np.nan
                    at, left, activity = states[row, 0], states[row, 1], states[row, 2]
                    place, level, raw, limit = states[row, 3], states[row, 4], raw_of[row], row * stride + size
                    while place < base + numel:
                        if place >= 0:
                            magnitude = (np.float32(abs(level)) + offsets[row, min(abs(level), 3) - 1]) * step
                            magnitude = np.float32(LARGEST) if magnitude > np.float32(LARGEST) else magnitude
                            t[place - base] += raw if level == 0 else (magnitude if level > 0 else -magnitude)
                        if left == 0:
                            place = end
                            break
                        left -= 1
                        window = _window(words, limit, at)
                        entry = np.int64(symbols[context_of(activity), window & np.uint64((1 << LONGEST) - 1)])
                        width, symbol = entry >> LONGEST, entry & ((1 << LONGEST) - 1)
                        if symbol == ESCAPE:
                            symbol = np.int64(window >> np.uint64(width)) & ((1 << ESCAPED_BITS) - 1)
                            width += ESCAPED_BITS
                        gap_class, level_class = symbol >> LEVEL_BITS, symbol & (LEVEL_CLASSES - 1)
                        activity = following(activity, gap_class, level_class)
                        gap_width, level_width = classes[gap_class, 1], classes[level_class, 1]
                        if width + gap_width + level_width > 31 or level_class == RAW:
                            at += width
                            window, width = _window(words, limit, at), np.int64(0)
                            place += classes[gap_class, 0] + _low(window, gap_width)
                            at += gap_width
                            window, gap_width = _window(words, limit, at), np.int64(0)
                        else:
                            window >>= np.uint64(width)
                            place += classes[gap_class, 0] + _low(window, gap_width)
                            window >>= np.uint64(gap_width)
                        if level_class == RAW:
                            raw_of[row] = np.uint32(window & np.uint64(0xFFFFFFFF)).view(np.float32)
                            raw, level, level_width = raw_of[row], np.int64(0), np.int64(31)
                        else:
                            level = classes[level_class, 0] + _low(window >> np.uint64(1), level_width)
                            level = -level if window & np.uint64(1) else level
                        at += width + gap_width + 1 + level_width
                        if place >= end:
                            left = np.int64(0)
                    states[row, 0], states[row, 1], states[row, 2] = at, left, activity
                    states[row, 3], states[row, 4] = place, level
                target = out[start + first : start + first + numel]
                for i in range(numel):
                    target[i] = t[i] * weight
                base += numel


@inlined
def _window(words: UInt32Array, limit: int, at: np.int64) -> np.uint64:
    """At least 33 bits from one on; zeros beyond the payload."""
    word = at >> 5
    if word + 1 < limit:
        bits = np.uint64(words[word]) | np.uint64(words[word + 1]) << np.uint64(32)
    else:
        bits = np.uint64(words[word]) if word < limit else np.uint64(0)
    return bits >> np.uint64(at & 31)


@inlined
def _low(window: np.uint64, width: np.int64) -> np.int64:
    return np.int64(window & ((np.uint64(1) << np.uint64(width)) - np.uint64(1)))
