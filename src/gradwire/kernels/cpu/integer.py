"""Levels of a scale that all workers share, so that codes add up."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gradwire.kernels.compensated import Compensated
from gradwire.kernels.cpu._compiled import (
    INFINITE,
    Float32Array,
    UInt8Array,
    allocating,
    array,
    float_of,
    halves,
    hash32,
    inlined,
)
from gradwire.kernels.cpu._source import Source, of_segment, settle, source_of
from gradwire.kernels.cpu.quantise import (
    CODES,
    Compiled,
    Payloads,
    Piece,
    Scratch,
    pack_codes,
    put_all,
    read_all,
    unpack_codes,
)
from gradwire.kernels.reference._torch import CHUNK, LARGEST_SCALE, SMALLEST_SCALE
from gradwire.kernels.reference.integer import Integers
from gradwire.layout import Block


def integer_scales(code: Integers, block: Block, source: Compensated, scales: Tensor) -> None:
    _scales(source_of(block, source), array(scales))


def integer_encode(
    code: Integers, block: Block, values: Tensor, subtract: bool, scales: Tensor, codes: Tensor, key: int
) -> None:
    source, packed = source_of(block, Compensated(values))._replace(keep=subtract), array(codes)
    packed[:] = 0
    put_all(code, block, source, array(scales).copy(), packed, key)


def integer_decode(code: Integers, block: Block, scales: Tensor, codes: Tensor, out: Tensor) -> None:
    read_all(code, block, Payloads(array(scales), 0, array(codes), 0, codes.numel(), 1, 1), out, 1.0)


@allocating
def _scales(source: Source, scales: Float32Array) -> None:
    t = np.empty(CHUNK, np.float32)
    for segment in range(scales.size):
        largest = np.uint32(0)
        for start, length, _ in of_segment(source, segment).runs:
            for low in range(start, start + length, CHUNK):
                largest = max(largest, settle(source, low, min(low + CHUNK, start + length), t))
        scales[segment] = np.float32(np.inf) if largest >= INFINITE else float_of(largest)


def _measure(code: Integers, source: Source, scale: Float32Array, scratch: Scratch) -> bool:
    return bool(np.isfinite(scale[0]))


def _put(code: Integers, piece: Piece, scale: Float32Array, scratch: Scratch) -> None:
    low_key, high_key = halves(piece.key)
    codes = scratch.codes[piece.low : piece.high]
    _draw(scratch.t[piece.low : piece.high], piece, codes, scale[0], code.levels, low_key, high_key)


@inlined
def _step(scale: np.float32, levels: int) -> np.float32:
    """See ``_step`` of the reference."""
    if not np.isfinite(scale):
        return np.float32(np.nan)
    if scale < np.float32(SMALLEST_SCALE):
        return np.float32(0)
    return np.float32(min(scale, np.float32(LARGEST_SCALE)) / np.float32(levels))


@inlined
def _draw(
    t: Float32Array,
    piece: Piece,
    codes: UInt8Array,
    scale: np.float32,
    levels: int,
    low_key: np.uint32,
    high_key: np.uint32,
) -> None:
    """Writes one code a byte, and leaves in the memory what the codes do not stand for."""
    memory, keep = piece.memory, piece.keep
    step = _step(scale, levels)
    zero = np.float32(levels)
    inverse = np.float32(zero / min(scale, np.float32(LARGEST_SCALE))) if step > 0 else np.float32(0)
    half = np.float32(levels + 2.0**-17)
    highest = np.int32(2 * levels)
    counter = np.uint32(piece.origin)
    for i in range(t.size):
        uniform = np.float32(hash32(low_key, high_key, counter) >> np.uint32(16))
        offset = uniform * np.float32(2.0**-16) + half
        code = max(min(np.int32(t[i] * inverse + offset), highest), np.int32(0))
        codes[i] = code
        if keep:
            memory[i] = t[i] - (np.float32(code) - zero) * step
        counter = np.uint32(counter + np.uint32(1))


def _add(
    code: Integers, low: int, high: int, position: int, scale: Float32Array, body: UInt8Array, scratch: Scratch
) -> None:
    step = _step(scale[0], code.levels) * np.float32(1 / code.workers)
    zero, highest = np.float32(code.levels * code.workers), np.uint8(2 * code.levels * code.workers)
    codes, total = scratch.codes[low:high], scratch.t[low:high]
    for i in range(total.size):
        total[i] += (np.float32(min(codes[i], highest)) - zero) * step


CODES[Integers] = Compiled(_measure, _put, pack_codes, unpack_codes, _add)
