"""As many bits as an absolute error bound asks for: 32, 16, 8 or none."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gradwire.errors import PayloadError
from gradwire.kernels.cpu._compiled import Float32Array, UInt8Array, UInt32Array, array, compiled
from gradwire.kernels.reference._torch import CHUNK
from gradwire.kernels.reference.inceptionn import BYTE, HALF, HALF_UNIT, RAW, check_bound, inceptionn_tags_bytes
from gradwire.layout import Int64Array


def inceptionn_encode(values: Tensor, bound: int, payload: Tensor) -> int:
    """See :meth:`gradwire.kernels.Kernels.inceptionn_encode`."""
    check_bound(bound)
    return int(_encode(array(values), bound, inceptionn_tags_bytes(values.numel()), array(payload)))


def inceptionn_decode(payload: Tensor, bound: int, values: Tensor) -> None:
    """See :meth:`gradwire.kernels.Kernels.inceptionn_decode`."""
    check_bound(bound)
    count = values.numel()
    head = inceptionn_tags_bytes(count)
    if payload.numel() < head:
        raise PayloadError(f"{payload.numel()} bytes are fewer than the tags of {count} values need")
    packed = array(payload)
    counts = _count(packed[:head])
    size = head + -(-(4 * counts[RAW] + 2 * counts[HALF] + counts[BYTE]) // 4) * 4
    if _has_more(packed[:head], count):
        raise PayloadError(f"there are tags beyond {count} values")
    if payload.numel() != size:
        raise PayloadError(f"{payload.numel()} bytes are not the {size} that the tags call for")
    _decode(packed, head, counts, bound, array(values))


@compiled
def _tags(values: Float32Array, bound: int, tags: UInt8Array) -> None:
    """How many bits each value is sent in."""
    middle, least = np.float32(2.0 ** -(bound // 2)), np.float32(2.0**-bound)
    for i in range(values.size):
        magnitude = abs(values[i])
        tags[i] = RAW - np.uint8(magnitude < 1) - np.uint8(magnitude < middle) - np.uint8(magnitude < least)


@compiled
def _encode(values: Float32Array, bound: int, head: int, payload: UInt8Array) -> int:
    tags = np.empty(CHUNK, np.uint8)
    counts = np.zeros(4, np.int64)
    payload[:head] = 0
    for first in range(0, values.size, CHUNK):
        chunk = values[first : first + CHUNK]
        _tags(chunk, bound, tags)
        for i in range(chunk.size):
            payload[(first + i) // 4] |= np.uint8(tags[i] << np.uint8(2 * (i % 4)))
            counts[tags[i]] += 1
    raw_at, half_at = head, head + 4 * counts[RAW]
    byte_at = half_at + 2 * counts[HALF]
    end = byte_at + counts[BYTE]
    used = int((end + 3) // 4 * 4)
    payload[end:used] = 0
    half_units, byte_units = np.float32(1 / HALF_UNIT), np.float32(2.0 ** (bound // 2 + 7))
    words = values.view(np.uint32)
    for i in range(values.size):
        tag = payload[i // 4] >> np.uint8(2 * (i % 4)) & np.uint8(3)
        if tag == BYTE:
            sign = np.int32(values[i] < 0) << np.int32(7)
            payload[byte_at] = np.uint8(np.int32(abs(values[i]) * byte_units) | sign)
            byte_at += 1
        elif tag == HALF:
            code = np.int32(abs(values[i]) * half_units) | np.int32(values[i] < 0) << np.int32(15)
            payload[half_at] = np.uint8(code & 255)
            payload[half_at + 1] = np.uint8(code >> 8)
            half_at += 2
        elif tag == RAW:
            payload[raw_at : raw_at + 4].view(np.uint32)[0] = words[i]
            raw_at += 4
    return used


@compiled
def _count(tags: UInt8Array) -> Int64Array:
    """How many values have each tag."""
    counts = np.zeros(4, np.int64)
    for i in range(tags.size):
        for part in range(4):
            counts[tags[i] >> np.uint8(2 * part) & np.uint8(3)] += 1
    return counts


@compiled
def _has_more(tags: UInt8Array, count: int) -> bool:
    """Whether there are tags of values beyond the last."""
    more = False
    for i in range(count, 4 * tags.size):
        more |= (tags[i // 4] >> np.uint8(2 * (i % 4)) & np.uint8(3)) != 0
    return more


@compiled
def _decode(payload: UInt8Array, head: int, counts: Int64Array, bound: int, values: Float32Array) -> None:
    raw_at, half_at = head, head + 4 * counts[RAW]
    byte_at = half_at + 2 * counts[HALF]
    half_unit, byte_unit = np.float32(HALF_UNIT), np.float32(2.0 ** -(bound // 2 + 7))
    words: UInt32Array = values.view(np.uint32)
    for i in range(values.size):
        tag = payload[i // 4] >> np.uint8(2 * (i % 4)) & np.uint8(3)
        if tag == BYTE:
            code = np.int32(payload[byte_at])
            byte_at += 1
            values[i] = _signed(code, np.int32(7)) * byte_unit
        elif tag == HALF:
            code = np.int32(np.int32(payload[half_at]) | np.int32(payload[half_at + 1]) << np.int32(8))
            half_at += 2
            values[i] = _signed(code, np.int32(15)) * half_unit
        elif tag == RAW:
            words[i] = payload[raw_at : raw_at + 4].view(np.uint32)[0]
            raw_at += 4
        else:
            values[i] = 0


@compiled
def _signed(code: np.int32, bits: np.int32) -> np.float32:
    """A number of some bits, and a sign above them."""
    magnitude = np.float32(np.int32(code & ((np.int32(1) << bits) - np.int32(1))))
    return -magnitude if code >> bits else magnitude
