"""Raw values, or shifted mantissas of two bytes, one or none, by exponent."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gradwire.kernels.compensated import Compensated
from gradwire.kernels.cpu._compiled import (
    INFINITE,
    MAGNITUDE,
    Float32Array,
    UInt8Array,
    UInt32Array,
    allocating,
    array,
    compiled,
)
from gradwire.kernels.cpu._instructions import store_word
from gradwire.kernels.cpu._packed import pack
from gradwire.kernels.cpu._source import Source, form, of_segment, settle_all, source_of
from gradwire.kernels.reference._torch import CHUNK
from gradwire.kernels.reference.inceptionn import (
    HEAD,
    SLACK,
    inceptionn_edges,
    inceptionn_offsets,
)
from gradwire.layout import Block, Int64Array

NEVER = 255
"""An exponent that no finite value has."""


def inceptionn_encode(block: Block, source: Compensated, payload: Tensor, bound: int) -> None:
    before_tags, before_values = inceptionn_offsets(block)
    room = payload.numel() - before_values - SLACK
    packed = array(payload)
    marks, head = packed[HEAD:before_tags], packed[:HEAD].view(np.int32)
    given = source_of(block, source)
    wanted = needed = _measure(given, marks, np.array(inceptionn_edges(bound, 0)))
    doublings = 0
    if needed > room:
        counts = _count_exponents(given, marks)
        while needed > room:
            doublings += 1
            low, middle, top = (min(edge, NEVER) for edge in inceptionn_edges(bound, doublings))
            needed = int(counts[low:].sum() + counts[middle:].sum() + 2 * counts[top:].sum())
    scarce = doublings > 0 and not needed
    doublings -= scarce
    head[:] = doublings, -(-wanted // 4)
    edges = np.array(inceptionn_edges(bound, doublings))
    _encode(given, marks, packed[before_tags:before_values], packed[before_values:], edges, room, scarce)


@compiled
def _threshold(edge: int) -> np.uint32:
    """Bits of the smallest magnitude whose exponent reaches the edge."""
    return np.uint32(np.uint32(min(edge, NEVER)) << np.uint32(23))


@compiled
def _measure(
    source: Source,
    marks: UInt8Array,
    edges: Int64Array,
) -> int:
    """Marks segments that are not finite; returns the bytes that the values of the others take."""
    low, middle, top = _threshold(edges[0]), _threshold(edges[1]), _threshold(edges[2])
    runs, segments, gradient, residual, _, beta, gamma = source
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
    source: Source,
    marks: UInt8Array,
) -> Int64Array:
    """How many values have each exponent, in segments that are not marked."""
    t = np.empty(CHUNK, np.float32)
    bits = t.view(np.uint32)
    counts = np.zeros(NEVER + 1, np.int64)
    for segment in range(source.segments.size - 1):
        if marks[segment >> 3] >> (segment & 7) & 1:
            continue
        for start, length, _ in of_segment(source, segment).runs:
            for first in range(0, length, CHUNK):
                a, b = start + first, start + min(first + CHUNK, length)
                form(source, a, b, t)
                for i in range(b - a):
                    counts[(bits[i] & MAGNITUDE) >> np.uint32(23)] += 1
    return counts


@allocating
def _encode(
    source: Source,
    marks: UInt8Array,
    packed_tags: UInt8Array,
    written: UInt8Array,
    edges: Int64Array,
    room: int,
    scarce: bool,
) -> None:
    """Writes tags and values; where it is ``scarce`` only the first that fill the ``room``, of a byte each."""
    runs, segments, gradient, residual, keep, beta, gamma = source
    none = np.full(edges.size, NEVER, np.int64)
    tags = np.zeros(CHUNK, np.uint8)
    codes = np.empty(CHUNK, np.uint32)
    packed_tags[:] = 0
    cursor = np.int64(0)
    for segment in range(segments.size - 1):
        if marks[segment >> 3] >> (segment & 7) & 1:
            if keep:
                settle_all(of_segment(source, segment))
            continue
        for run in range(segments[segment], segments[segment + 1]):
            start, length, position = runs[run]
            for first in range(0, length, CHUNK):
                count = min(CHUNK, length - first)
                a, b = start + first, start + first + count
                end = b
                if scarce:
                    end = a + _fitting(gradient[a:b], residual[a:b], beta, gamma, _threshold(edges[0]), room - cursor)
                    _shift(gradient[end:b], residual[end:b], keep, beta, gamma, none, tags[end - a :], codes[end - a :])
                _shift(gradient[a:end], residual[a:end], keep, beta, gamma, edges, tags, codes)
                pack(tags, count, 2, packed_tags[(position + first) >> 2 :])
                cursor = _write(tags[:count], codes, written, cursor)
    written[cursor:] = 0


@compiled
def _fitting(
    gradient: Float32Array, residual: Float32Array, beta: np.float32, gamma: np.float32, low: np.uint32, room: int
) -> int:
    """How many values there are before the one that reaches ``low`` and has no room."""
    for i in range(gradient.size):
        t = np.float32(beta * residual[i] + gamma * gradient[i])
        room -= int(np.uint32(t.view(np.uint32) & MAGNITUDE) >= low)
        if room < 0:
            return i
    return gradient.size


@compiled
def _shift(
    gradient: Float32Array,
    residual: Float32Array,
    keep: bool,
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
        if keep:
            size = np.float32(np.int32(shifted)) * (step_of_two if wide else step_of_one)
            rest = t - (-size if t < 0 else size)
            residual[i] = np.float32(0) if raw else rest if sent else t


@compiled
def _shifted(magnitude: np.uint32, reach: np.int32) -> np.uint32:
    """The mantissa, its leading one included, shifted right by as much as the exponent is below its reach."""
    mantissa = np.uint32((magnitude & np.uint32(0x7FFFFF)) | np.uint32(0x800000))
    distance = np.int32(reach - np.int32(magnitude >> np.uint32(23)))
    return np.uint32(mantissa >> np.uint32(min(max(distance, np.int32(0)), np.int32(31))))


@compiled
def _write(tags: UInt8Array, codes: UInt32Array, written: UInt8Array, cursor: np.int64) -> np.int64:
    """Writes as many bytes of each code as its tag says; what is written beyond, the next one overwrites."""
    for i in range(tags.size):
        store_word(written, cursor, codes[i])
        cursor = np.int64(cursor + tags[i] + (tags[i] == 3))
    return cursor
