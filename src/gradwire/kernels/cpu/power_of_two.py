"""Powers of two, drawn so that the mean is right."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gradwire.kernels.cpu._compiled import (
    INFINITE,
    Float32Array,
    UInt8Array,
    UInt32Array,
    add_compensated,
    array,
    compensate,
    compensation,
    compiled,
    hash32,
    largest_of_runs,
    rows_of_bytes,
    sign_words,
)
from gradwire.kernels.cpu.sign import pack_signs
from gradwire.kernels.reference._torch import CHUNK
from gradwire.kernels.reference.power_of_two import DISTANCES, FRACTION_BITS, LARGEST_EXPONENT, NOT_FINITE
from gradwire.layout import Block, Int64Array, UInt64Array
from gradwire.randomness import run_keys


def power_of_two_encode(
    block: Block,
    gradient: Tensor,
    residual: Tensor | None,
    beta: float,
    gamma: float,
    payload: Tensor,
    bits: int,
    key: int,
) -> None:
    """See :meth:`gradwire.kernels.Kernels.power_of_two_encode`."""
    head = 4 * block.segment_count if bits == 8 else 0
    packed = array(payload)
    _encode(
        block.runs,
        block.segments,
        block.origins,
        run_keys(key, block.streams),
        *compensation(gradient, residual, beta, gamma),
        packed[:head].view(np.float32),
        packed[head : head + block.positions],
        packed[head + block.positions :],
    )


def power_of_two_decode(block: Block, payloads: Tensor, out: Tensor, weight: float, bits: int) -> None:
    """See :meth:`gradwire.kernels.Kernels.power_of_two_decode`."""
    packed, stride = rows_of_bytes(payloads)
    arguments = (block.runs, block.segments, packed, len(payloads), stride, array(out), np.float32(weight))
    if bits == 8:
        _decode_bytes(*arguments)
    else:
        _decode_fields(*arguments, block.positions)


@compiled
def _encode(
    runs: Int64Array,
    segments: Int64Array,
    origins: Int64Array,
    keys: UInt64Array,
    gradient: Float32Array,
    residual: Float32Array,
    keep: bool,
    beta: np.float32,
    gamma: np.float32,
    units: Float32Array,
    fields: UInt8Array,
    signs: UInt8Array,
) -> None:
    """Writes signs beside the exponents where there are no units, else into their bytes."""
    t = np.empty(CHUNK, np.float32)
    in_bytes = units.size > 0
    fields[:] = 0
    signs[:] = 0
    for segment in range(segments.size - 1):
        first_run, last_run = segments[segment], segments[segment + 1]
        largest = largest_of_runs(runs[first_run:last_run], gradient, residual, beta, gamma)
        if largest >= INFINITE:
            if in_bytes:
                units[segment] = np.nan
            else:
                for run in range(first_run, last_run):
                    fields[runs[run, 2] : runs[run, 2] + runs[run, 1]] = NOT_FINITE
            if keep:
                add_compensated(runs[first_run:last_run], gradient, residual, beta, gamma)
            continue
        shift = 0
        if in_bytes:
            field = int(largest >> np.uint32(FRACTION_BITS))
            shift = max(0, min(field + 1, LARGEST_EXPONENT) - DISTANCES)
            units[segment] = np.float32(2.0**shift)
        for run in range(first_run, last_run):
            start, length, position = runs[run]
            low_key = np.uint32(keys[run] & np.uint64(0xFFFFFFFF))
            high_key = np.uint32(keys[run] >> np.uint64(32))
            for first in range(0, length, CHUNK):
                low, high = start + first, start + min(first + CHUNK, length)
                memory, values = residual[low:high], t[: high - low]
                compensate(gradient[low:high], memory, beta, gamma, values)
                piece = fields[position + first : position + first + high - low]
                _round(values, memory, keep, shift, low_key, high_key, origins[run] + first, piece)
                if in_bytes:
                    for i in range(piece.size):
                        piece[i] = np.uint8(piece[i] | np.uint8(values[i] < 0) << np.uint8(7))
                else:
                    pack_signs(t, high - low, signs[(position + first) // 8 :])


@compiled
def _round(
    t: Float32Array,
    residual: Float32Array,
    keep: bool,
    shift: int,
    low_key: np.uint32,
    high_key: np.uint32,
    origin: int,
    fields: UInt8Array,
) -> None:
    """Draws one exponent a value, and leaves in the residual what they do not stand for."""
    scale, unit = np.float32(2.0**-shift), np.float32(2.0**shift)
    highest = np.uint32(LARGEST_EXPONENT - shift)
    counter = np.uint32(origin)
    words = np.empty(t.size, np.uint32)
    powers = words.view(np.float32)
    for i in range(t.size):
        random = np.uint32(hash32(low_key, high_key, counter) >> np.uint32(32 - FRACTION_BITS))
        field = np.uint32(np.uint32(_bits(abs(t[i]) * scale) + random) >> np.uint32(FRACTION_BITS))
        field = min(field, highest)
        fields[i] = np.uint8(field)
        sign = np.uint32(np.uint32(t[i] < 0) << np.uint32(31))
        words[i] = np.uint32(np.uint32(field << np.uint32(FRACTION_BITS)) | sign)
        counter = np.uint32(counter + np.uint32(1))
    if keep:
        for i in range(t.size):
            residual[i] = t[i] - powers[i] * unit


@compiled
def _bits(value: np.float32) -> np.uint32:
    """The bits of a float32."""
    return np.float32(value).view(np.uint32)


@compiled
def _decode_bytes(
    runs: Int64Array,
    segments: Int64Array,
    payloads: UInt8Array,
    rows: int,
    stride: int,
    out: Float32Array,
    weight: np.float32,
) -> None:
    units = payloads.view(np.float32)
    head = 4 * (segments.size - 1)
    total = np.empty(CHUNK, np.float32)
    words = np.empty(CHUNK, np.uint32)
    for segment in range(segments.size - 1):
        for run in range(segments[segment], segments[segment + 1]):
            start, length, position = runs[run]
            for first in range(0, length, CHUNK):
                count = min(CHUNK, length - first)
                total[:] = -0.0  # to which adding a row gives that row, whichever its sign of zero
                for row in range(rows):
                    base = row * stride + head + position + first
                    _read_bytes(payloads[base : base + count], words)
                    add_words(words, units[row * stride // 4 + segment], total[:count])
                piece = out[start + first : start + first + count]
                for i in range(count):
                    piece[i] = total[i] * weight


@compiled
def _read_bytes(codes: UInt8Array, words: UInt32Array) -> None:
    """Moves a sign and a 7-bit exponent to their places in a float32."""
    for i in range(codes.size):
        code = np.uint32(codes[i])
        sign = np.uint32(np.uint32(code & np.uint32(128)) << np.uint32(24))
        words[i] = np.uint32(np.uint32(np.uint32(code & np.uint32(127)) << np.uint32(FRACTION_BITS)) | sign)


@compiled
def _decode_fields(
    runs: Int64Array,
    segments: Int64Array,
    payloads: UInt8Array,
    rows: int,
    stride: int,
    out: Float32Array,
    weight: np.float32,
    positions: int,
) -> None:
    total = np.empty(CHUNK, np.float32)
    words = np.empty(CHUNK, np.uint32)
    for run in range(len(runs)):
        start, length, position = runs[run]
        for first in range(0, length, CHUNK):
            count = min(CHUNK, length - first)
            total[:] = -0.0  # to which adding a row gives that row, whichever its sign of zero
            for row in range(rows):
                base = row * stride + position + first
                signs = row * stride + positions + (position + first) // 8
                for byte in range((count + 7) // 8):
                    sign_words(words, 8 * byte, payloads[signs + byte])
                _read_fields(payloads[base : base + count], words)
                add_words(words, np.float32(1), total[:count])
            piece = out[start + first : start + first + count]
            for i in range(count):
                piece[i] = total[i] * weight


@compiled
def _read_fields(fields: UInt8Array, words: UInt32Array) -> None:
    """Puts an exponent below each sign; the mark of what is not finite becomes NaN."""
    for i in range(fields.size):
        field = np.uint32(fields[i])
        marked = np.uint32(np.uint32(np.uint32(field + np.uint32(1)) >> np.uint32(8)) << np.uint32(FRACTION_BITS - 1))
        words[i] = np.uint32(words[i] | np.uint32(field << np.uint32(FRACTION_BITS)) | marked)


@compiled
def add_words(words: UInt32Array, unit: np.float32, total: Float32Array) -> None:
    """Adds float32 values, given as their bits, times a unit."""
    values = words.view(np.float32)
    for i in range(total.size):
        total[i] += values[i] * unit
