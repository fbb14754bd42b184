"""Reads what ``inceptionn`` writes: values of as many bytes as their tags say."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from gradwire.kernels.cpu._compiled import (
    Float32Array,
    UInt8Array,
    UInt32Array,
    allocating,
    array,
    compiled,
    rows_of_bytes,
)
from gradwire.kernels.cpu._instructions import load_word
from gradwire.kernels.cpu._packed import unpack
from gradwire.kernels.reference._torch import CHUNK
from gradwire.kernels.reference.inceptionn import HEAD, WIDTHS, check_inceptionn, inceptionn_edges, inceptionn_offsets
from gradwire.layout import Block, Int64Array

UInt16Array = np.ndarray[Any, np.dtype[np.uint16]]

ENDS = np.array([[WIDTHS[packed >> shift & 3] for shift in (0, 2, 4, 6)] for packed in range(256)]).cumsum(1)
ENDS = ENDS.astype(np.uint8).view(np.uint32).ravel()
"""Where the values of four tags end, a byte each, for each byte of tags."""


def inceptionn_decode(block: Block, payloads: Tensor, out: Tensor, weight: float, bound: int) -> None:
    before_tags, before_values = inceptionn_offsets(block)
    for payload in payloads:
        tags = array(payload)[before_tags : before_tags + block.positions // 4]
        check_inceptionn(block, payload, _bytes_of(tags.view(np.uint16)))
    doublings = payloads[:, 0].tolist()
    edges = np.array([inceptionn_edges(bound, each) for each in doublings], dtype=np.int64).reshape(-1, 3)
    with np.errstate(over="ignore"):
        steps = np.exp2(edges[:, 1:] - np.array([7.0, 15.0]) - 127).astype(np.float32)
    packed, stride = rows_of_bytes(payloads)
    _decode(
        block.runs,
        block.segments,
        packed,
        len(payloads),
        stride,
        before_tags,
        before_values,
        steps,
        array(out),
        np.float32(weight),
    )


@compiled
def _bytes_of(tags: UInt16Array) -> int:
    """Bytes that the values take, for eight tags a word."""
    needed = 0
    for i in range(tags.size):
        word = np.uint32(tags[i])
        even, odd = np.uint32(word & np.uint32(0x3333)), np.uint32((word >> np.uint32(2)) & np.uint32(0x3333))
        even = np.uint32(even + (even & (even >> np.uint32(1)) & np.uint32(0x1111)))
        odd = np.uint32(odd + (odd & (odd >> np.uint32(1)) & np.uint32(0x1111)))
        pairs = np.uint32(even + odd)
        octets = np.uint32((pairs & np.uint32(0x0F0F)) + ((pairs >> np.uint32(4)) & np.uint32(0x0F0F)))
        needed += int((octets + (octets >> np.uint32(8))) & np.uint32(0xFF))
    return needed


@allocating
def _decode(
    runs: Int64Array,
    segments: Int64Array,
    payloads: UInt8Array,
    rows: int,
    stride: int,
    before_tags: int,
    before_values: int,
    steps: Float32Array,
    out: Float32Array,
    weight: np.float32,
) -> None:
    cursors = np.empty(rows, np.int64)
    for row in range(rows):
        cursors[row] = row * stride + before_values
    tags = np.empty(CHUNK, np.uint8)
    words = np.empty(CHUNK, np.uint32)
    total = np.empty(CHUNK, np.float32)
    for segment in range(segments.size - 1):
        for run in range(segments[segment], segments[segment + 1]):
            start, length, position = runs[run]
            for first in range(0, length, CHUNK):
                count = min(CHUNK, length - first)
                total[:] = -0.0  # to which adding a row gives that row, whichever its sign of zero
                for row in range(rows):
                    base = row * stride + before_tags + ((position + first) >> 2)
                    packed = payloads[base : base + (count + 7) // 8 * 2]
                    unpack(packed, 2, tags)
                    cursors[row] = _read(packed, tags[:count], payloads, cursors[row], words)
                    if payloads[row * stride + HEAD + (segment >> 3)] >> (segment & 7) & 1:
                        total[:] = np.nan
                    else:
                        _add(tags[:count], words, steps[row, 0], steps[row, 1], total)
                piece = out[start + first : start + first + count]
                for i in range(count):
                    piece[i] = total[i] * weight


@compiled
def _read(packed: UInt8Array, tags: UInt8Array, payloads: UInt8Array, cursor: int, words: UInt32Array) -> int:
    """The four bytes from where each value starts."""
    whole = tags.size // 4
    for quad in range(whole):
        ends = ENDS[packed[quad]]
        words[4 * quad] = load_word(payloads, cursor)
        words[4 * quad + 1] = load_word(payloads, cursor + np.int64(ends & np.uint32(0xFF)))
        words[4 * quad + 2] = load_word(payloads, cursor + np.int64(ends >> np.uint32(8) & np.uint32(0xFF)))
        words[4 * quad + 3] = load_word(payloads, cursor + np.int64(ends >> np.uint32(16) & np.uint32(0xFF)))
        cursor += int(ends >> np.uint32(24))
    for i in range(4 * whole, tags.size):
        words[i] = load_word(payloads, cursor)
        cursor += int(tags[i] + (tags[i] == 3))
    return cursor


@compiled
def _add(
    tags: UInt8Array, words: UInt32Array, step_of_one: np.float32, step_of_two: np.float32, total: Float32Array
) -> None:
    """Adds what the words stand for."""
    raws = words.view(np.float32)
    for i in range(tags.size):
        tag, word = tags[i], words[i]
        wide = tag == 2
        mantissa = np.float32(np.int32(word & (np.uint32(0x7FFF) if wide else np.uint32(0x7F))))
        size = mantissa * (step_of_two if wide else step_of_one)
        value = -size if word & (np.uint32(0x8000) if wide else np.uint32(0x80)) else size
        total[i] += np.float32(0) if tag == 0 else raws[i] if tag == 3 else value
