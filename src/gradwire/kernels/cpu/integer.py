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
    inlined,
)
from gradwire.kernels.cpu._source import Source, of_segment, settle, source_of
from gradwire.kernels.cpu.qsgd import add_levels, put_levels
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
    source, packed = Compensated(values, values if subtract else None, 0.0, 1.0), array(codes)
    packed[:] = 0
    put_all(code, block, source_of(block, source), array(scales).copy(), packed, key)


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
    step = _step(scale[0], code.levels)
    shared = np.float32(min(scale[0], np.float32(LARGEST_SCALE)))
    inverse = np.float32(np.float32(code.levels) / shared) if step > 0 else np.float32(0)
    t, codes = scratch.t[piece.low : piece.high], scratch.codes[piece.low : piece.high]
    low_key, high_key = halves(piece.key)
    put_levels(t, piece, codes, inverse, step, code.levels, False, low_key, high_key)


@inlined
def _step(scale: np.float32, levels: int) -> np.float32:
    """See ``_step`` of the reference."""
    if not np.isfinite(scale):
        return np.float32(np.nan)
    if scale < np.float32(SMALLEST_SCALE):
        return np.float32(0)
    return np.float32(min(scale, np.float32(LARGEST_SCALE)) / np.float32(levels))


def _add(
    code: Integers, low: int, high: int, position: int, scale: Float32Array, body: UInt8Array, scratch: Scratch
) -> None:
    step = np.float32(_step(scale[0], code.levels) * np.float32(1 / code.workers))
    add_levels(scratch.codes[low:high], step, code.levels * code.workers, scratch.t[low:high])


CODES[Integers] = Compiled(_measure, _put, pack_codes, unpack_codes, _add)
