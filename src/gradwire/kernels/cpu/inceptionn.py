"""Raw values, or shifted mantissas of two bytes, one or none, by exponent."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from torch import Tensor

from gradwire.kernels.cpu._compiled import (
    INFINITE,
    MAGNITUDE,
    Float32Array,
    UInt8Array,
    UInt32Array,
    add_compensated,
    allocating,
    array,
    compensate,
    compensation,
    compiled,
    element_pointer,
    intrinsic,
    rows_of_bytes,
)
from gradwire.kernels.reference._torch import CHUNK
from gradwire.kernels.reference.inceptionn import (
    HEAD,
    SLACK,
    WIDTHS,
    check_inceptionn,
    inceptionn_edges,
    inceptionn_offsets,
)
from gradwire.layout import Block, Int64Array

UInt16Array = np.ndarray[Any, np.dtype[np.uint16]]

ENDS = np.array([[WIDTHS[packed >> shift & 3] for shift in (0, 2, 4, 6)] for packed in range(256)]).cumsum(1)
ENDS = ENDS.astype(np.uint8).view(np.uint32).ravel()
"""Where the values of four tags end, a byte each, for each byte of tags."""

NEVER = 255
"""An exponent that no finite value has."""


def inceptionn_encode(
    block: Block, gradient: Tensor, residual: Tensor | None, beta: float, gamma: float, payload: Tensor, bound: int
) -> None:
    values, memory, keep, memory_weight, weight = compensation(gradient, residual, beta, gamma)
    before_tags, before_values = inceptionn_offsets(block)
    room = payload.numel() - before_values - SLACK
    packed = array(payload)
    marks, head = packed[HEAD:before_tags], packed[:HEAD].view(np.int32)
    source = (block.runs, block.segments, values, memory, memory_weight, weight)
    wanted = needed = _measure(*source, marks, np.array(inceptionn_edges(bound, 0)))
    doublings = 0
    if needed > room:
        counts = _count_exponents(*source, marks)
        while needed > room:
            doublings += 1
            low, middle, top = (min(edge, NEVER) for edge in inceptionn_edges(bound, doublings))
            needed = int(counts[low:].sum() + counts[middle:].sum() + 2 * counts[top:].sum())
    head[:] = doublings, -(-wanted // 4)
    edges = np.array(inceptionn_edges(bound, doublings))
    _encode(*source, keep, marks, packed[before_tags:before_values], packed[before_values:], edges)


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


@intrinsic
def load_word(typing_context: Any, octets: Any, index: Any) -> Any:
    """The four bytes from ``index`` on as a uint32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = element_pointer(context, builder, signature.args[0], args[0], args[1], ir.IntType(32))
        return builder.load(pointer, align=1)

    return types.uint32(octets, types.intp), generate


@intrinsic
def store_word(typing_context: Any, octets: Any, index: Any, word: Any) -> Any:
    """Writes a uint32 to the four bytes from ``index`` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        octets, index, word = args
        pointer = element_pointer(context, builder, signature.args[0], octets, index, ir.IntType(32))
        builder.store(word, pointer, align=1)
        return context.get_dummy_value()

    return types.void(octets, types.intp, types.uint32), generate


@compiled
def _threshold(edge: int) -> np.uint32:
    """Bits of the smallest magnitude whose exponent reaches the edge."""
    return np.uint32(np.uint32(min(edge, NEVER)) << np.uint32(23))


@compiled
def _measure(
    runs: Int64Array,
    segments: Int64Array,
    gradient: Float32Array,
    residual: Float32Array,
    beta: np.float32,
    gamma: np.float32,
    marks: UInt8Array,
    edges: Int64Array,
) -> int:
    """Marks segments that are not finite; returns the bytes that the values of the others take."""
    low, middle, top = _threshold(edges[0]), _threshold(edges[1]), _threshold(edges[2])
    marks[:] = 0
    needed = 0
    for segment in range(segments.size - 1):
        of_segment = 0
        largest = np.uint32(0)
        for run in range(segments[segment], segments[segment + 1]):
            start, length = runs[run, 0], runs[run, 1]
            for first in range(0, length, CHUNK):
                a, b = start + first, start + min(first + CHUNK, length)
                largest_here, needed_here = _measure_piece(gradient[a:b], residual[a:b], beta, gamma, low, middle, top)
                largest = max(largest, largest_here)
                of_segment += int(needed_here)
        if largest >= INFINITE:
            marks[segment >> 3] |= np.uint8(1 << (segment & 7))
        else:
            needed += of_segment
    return needed


@compiled
def _measure_piece(
    gradient: Float32Array,
    residual: Float32Array,
    beta: np.float32,
    gamma: np.float32,
    low: np.uint32,
    middle: np.uint32,
    top: np.uint32,
) -> tuple[np.uint32, np.uint32]:
    """Bits of the largest magnitude, and the bytes that the values take."""
    largest, needed = np.uint32(0), np.uint32(0)
    for i in range(gradient.size):
        t = np.float32(beta * residual[i] + gamma * gradient[i])
        magnitude = np.uint32(t.view(np.uint32) & MAGNITUDE)
        largest = max(largest, magnitude)
        needed += (
            np.uint32(magnitude >= low) + np.uint32(magnitude >= middle) + np.uint32(magnitude >= top) * np.uint32(2)
        )
    return largest, needed


@allocating
def _count_exponents(
    runs: Int64Array,
    segments: Int64Array,
    gradient: Float32Array,
    residual: Float32Array,
    beta: np.float32,
    gamma: np.float32,
    marks: UInt8Array,
) -> Int64Array:
    """How many values have each exponent, in segments that are not marked."""
    t = np.empty(CHUNK, np.float32)
    bits = t.view(np.uint32)
    counts = np.zeros(NEVER + 1, np.int64)
    for segment in range(segments.size - 1):
        if marks[segment >> 3] >> (segment & 7) & 1:
            continue
        for run in range(segments[segment], segments[segment + 1]):
            start, length = runs[run, 0], runs[run, 1]
            for first in range(0, length, CHUNK):
                a, b = start + first, start + min(first + CHUNK, length)
                compensate(gradient[a:b], residual[a:b], beta, gamma, t[: b - a])
                for i in range(b - a):
                    counts[(bits[i] & MAGNITUDE) >> np.uint32(23)] += 1
    return counts


@allocating
def _encode(
    runs: Int64Array,
    segments: Int64Array,
    gradient: Float32Array,
    residual: Float32Array,
    beta: np.float32,
    gamma: np.float32,
    keep: bool,
    marks: UInt8Array,
    packed_tags: UInt8Array,
    written: UInt8Array,
    edges: Int64Array,
) -> None:
    tags = np.zeros(CHUNK, np.uint8)
    codes = np.empty(CHUNK, np.uint32)
    packed_tags[:] = 0
    cursor = np.int64(0)
    for segment in range(segments.size - 1):
        if marks[segment >> 3] >> (segment & 7) & 1:
            if keep:
                add_compensated(runs[segments[segment] : segments[segment + 1]], gradient, residual, beta, gamma)
            continue
        for run in range(segments[segment], segments[segment + 1]):
            start, length, position = runs[run]
            for first in range(0, length, CHUNK):
                count = min(CHUNK, length - first)
                a, b = start + first, start + first + count
                if keep:
                    _shift(gradient[a:b], residual[a:b], beta, gamma, edges, tags, codes)
                else:
                    _only_shift(gradient[a:b].view(np.uint32), edges, tags, codes)
                stop = (count + 7) // 8 * 8
                tags[count:stop] = 0
                _pack(tags[:stop].view(np.uint32), packed_tags[(position + first) >> 2 :])
                cursor = _write(tags[:count], codes, written, cursor)
    written[cursor:] = 0


@compiled
def _shift(
    gradient: Float32Array,
    residual: Float32Array,
    beta: np.float32,
    gamma: np.float32,
    edges: Int64Array,
    tags: UInt8Array,
    codes: UInt32Array,
) -> None:
    """Tags, and codes of which the lower bytes count; leaves in the residual what these do not stand for."""
    low, middle, top = _threshold(edges[0]), _threshold(edges[1]), _threshold(edges[2])
    reach_of_one, reach_of_two = np.int32(23 + edges[1] - 7), np.int32(23 + edges[2] - 15)
    step_of_one = np.float32(2.0 ** np.float64(edges[1] - 7 - 127))
    step_of_two = np.float32(2.0 ** np.float64(edges[2] - 15 - 127))
    for i in range(gradient.size):
        t = np.float32(beta * residual[i] + gamma * gradient[i])
        bits = np.uint32(t.view(np.uint32))
        magnitude = np.uint32(bits & MAGNITUDE)
        sent, wide, raw = magnitude >= low, magnitude >= middle, magnitude >= top
        shifted = _shifted(magnitude, reach_of_two if wide else reach_of_one)
        signed = np.uint32(np.uint32(bits >> np.uint32(31)) << (np.uint32(15) if wide else np.uint32(7)))
        codes[i] = bits if raw else np.uint32(shifted | signed)
        tags[i] = np.uint8(np.uint8(sent) + np.uint8(wide) + np.uint8(raw))
        size = np.float32(np.int32(shifted)) * (step_of_two if wide else step_of_one)
        rest = t - (-size if t < 0 else size)
        residual[i] = np.float32(0) if raw else rest if sent else t


@compiled
def _only_shift(bits: UInt32Array, edges: Int64Array, tags: UInt8Array, codes: UInt32Array) -> None:
    """Tags, and codes of which the lower bytes count."""
    low, middle, top = _threshold(edges[0]), _threshold(edges[1]), _threshold(edges[2])
    reach_of_one, reach_of_two = np.int32(23 + edges[1] - 7), np.int32(23 + edges[2] - 15)
    for i in range(bits.size):
        magnitude = np.uint32(bits[i] & MAGNITUDE)
        sent, wide, raw = magnitude >= low, magnitude >= middle, magnitude >= top
        shifted = _shifted(magnitude, reach_of_two if wide else reach_of_one)
        signed = np.uint32(np.uint32(bits[i] >> np.uint32(31)) << (np.uint32(15) if wide else np.uint32(7)))
        codes[i] = bits[i] if raw else np.uint32(shifted | signed)
        tags[i] = np.uint8(np.uint8(sent) + np.uint8(wide) + np.uint8(raw))


@compiled
def _shifted(magnitude: np.uint32, reach: np.int32) -> np.uint32:
    """The mantissa, its leading one included, shifted right by as much as the exponent is below its reach."""
    mantissa = np.uint32((magnitude & np.uint32(0x7FFFFF)) | np.uint32(0x800000))
    distance = np.int32(reach - np.int32(magnitude >> np.uint32(23)))
    return np.uint32(mantissa >> np.uint32(min(max(distance, np.int32(0)), np.int32(31))))


@compiled
def _pack(tags: UInt32Array, packed: UInt8Array) -> None:
    """Packs tags of a byte each, four at a time."""
    for i in range(tags.size):
        packed[i] = np.uint8(tags[i] | tags[i] >> 6 | tags[i] >> 12 | tags[i] >> 18)


@compiled
def _write(tags: UInt8Array, codes: UInt32Array, written: UInt8Array, cursor: np.int64) -> np.int64:
    """Writes as many bytes of each code as its tag says; what is written beyond, the next one overwrites."""
    for i in range(tags.size):
        store_word(written, cursor, codes[i])
        cursor = np.int64(cursor + tags[i] + (tags[i] == 3))
    return cursor


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
                    _unpack(packed, tags.view(np.uint32))
                    cursors[row] = _read(packed, tags[:count], payloads, cursors[row], words)
                    if payloads[row * stride + HEAD + (segment >> 3)] >> (segment & 7) & 1:
                        total[:] = np.nan
                    else:
                        _add(tags[:count], words, steps[row, 0], steps[row, 1], total)
                piece = out[start + first : start + first + count]
                for i in range(count):
                    piece[i] = total[i] * weight


@compiled
def _unpack(packed: UInt8Array, tags: UInt32Array) -> None:
    """Inverse of ``_pack``."""
    for i in range(packed.size):
        quad = np.uint32(packed[i])
        tags[i] = np.uint32((quad | quad << 6 | quad << 12 | quad << 18) & 0x03030303)


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
