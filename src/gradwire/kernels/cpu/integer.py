"""Levels of a scale that all workers share, so that codes add up."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from gradwire.kernels.compensated import Compensated
from gradwire.kernels.cpu._compiled import INFINITE, Float32Array, allocating, array, float_of
from gradwire.kernels.cpu._source import Source, of_segment, settle, source_of, total
from gradwire.kernels.cpu._stages import CODES, Compiled, Scratch
from gradwire.kernels.cpu.qsgd import level_of, value_of_level, write_norm
from gradwire.kernels.cpu.quantise import Payloads, put_all, read_all
from gradwire.kernels.reference._torch import CHUNK, LANES, LARGEST_SCALE, SMALLEST_SCALE
from gradwire.kernels.reference.integer import Integers
from gradwire.layout import Block


def integer_scales(code: Integers, block: Block, source: Compensated, scales: Tensor) -> None:
    _scales(source_of(block, source), array(scales))


def integer_encode(
    code: Integers, block: Block, values: Tensor, subtract: bool, scales: Tensor, codes: Tensor, key: int
) -> None:
    source, packed = Compensated(values, values if subtract else None, 0.0, 1.0), array(codes)
    packed[:] = 0
    put_all(code._replace(workers=1), block, source_of(block, source), array(scales).copy(), packed, key)


def integer_decode(code: Integers, block: Block, scales: Tensor, codes: Tensor, out: Tensor) -> None:
    read_all(code, block, Payloads(array(scales), 0, array(codes), 0, codes.numel(), 1, 1), out, 1.0)


def euclidean_norms(block: Block, values: Tensor, norms: Tensor) -> None:
    _norms(source_of(block, Compensated(values, None, 0.0, 1.0)), array(norms))


@allocating
def _norms(source: Source, norms: Float32Array) -> None:
    lanes = np.empty((2, LANES), np.float64)
    for segment in range(norms.size):
        if not write_norm(math.sqrt(total(of_segment(source, segment), True, lanes)), norms[segment : segment + 1]):
            norms[segment] = np.float32(np.nan)


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


def _units(code: Integers, scale: Float32Array) -> tuple[np.float32, np.float32]:
    """Levels in 1, and what one is worth: 0 for a scale too small to divide by, NaN for one that is not finite."""
    if not np.isfinite(scale[0]):
        return np.float32(0), np.float32(np.nan)
    if scale[0] < np.float32(SMALLEST_SCALE):
        return np.float32(0), np.float32(0)
    levels, shared = np.float32(code.levels), np.float32(min(scale[0], np.float32(LARGEST_SCALE)))
    return np.float32(levels / shared), np.float32(np.float32(shared / levels) * np.float32(1 / code.workers))


def _number(code: Integers, t: np.float32, one: np.float32, other: np.float32, random: np.uint32) -> np.int32:
    return np.int32(level_of(t * one, np.int32(code.levels), False, random))


def _value(code: Integers, number: np.int32, one: np.float32, other: np.float32) -> np.float32:
    return np.float32(value_of_level(number, np.int32(code.levels * code.workers), other))


CODES[Integers] = Compiled(_measure, _number, _value, _units)
