"""Randomised Hadamard rotations in the first-level cache."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from torch import Tensor

from gradwire.kernels.cpu._compiled import (
    Float32Array,
    UInt8Array,
    allocating,
    array,
    compiled,
    halves,
    hash32,
    rows_of_bytes,
)
from gradwire.kernels.cpu._instructions import element_pointer, intrinsic
from gradwire.kernels.cpu._source import total_square
from gradwire.kernels.parts import ranges, side_by_side
from gradwire.kernels.reference._torch import LANES, SMALLEST_SCALE
from gradwire.kernels.reference.rotation import LARGEST, PLAIN
from gradwire.layout import Int64Array, UInt64Array

_LANES = 8
"""Values of a vector, no more than the smallest piece has."""

_VECTOR = ir.VectorType(ir.FloatType(), _LANES)

Int32Array = np.ndarray[Any, np.dtype[np.int32]]


def hadamard(starts: Int64Array, values: Tensor, factor: float) -> None:
    _plain(starts, array(values), np.float32(factor))


@compiled
def _plain(starts: Int64Array, values: Float32Array, factor: np.float32) -> None:
    for number in range(starts.size):
        part = values[starts[number] : starts[number] + PLAIN]
        for i in range(PLAIN):
            part[i] *= np.float32(1 / PLAIN)
        _hadamard(part, PLAIN)
        for i in range(PLAIN):
            part[i] *= factor


def rotated_scales(pieces: Int64Array, values: Tensor, scales: Tensor) -> None:
    found, given = array(scales), array(values)
    side_by_side(lambda some: _scales(pieces[some], given, found[some]), slices(pieces))


def rotated_encode(
    pieces: Int64Array,
    values: Tensor,
    residual: Tensor | None,
    scales: Tensor,
    levels: Tensor,
    reach: float,
    shared: UInt64Array,
    own: UInt64Array,
    payload: Tensor,
) -> None:
    table = array(levels).astype(np.float32)
    lower = (np.searchsorted(array(levels), np.arange(int(levels[-1])), side="right") - 1).astype(np.int32)
    memory, packed, found = array(values if residual is None else residual), array(payload), array(scales)
    packed[:] = 0
    given, cells = (array(values), memory, residual is not None), (lower, table[lower], table[lower + 1] - table[lower])
    side_by_side(
        lambda some: _encode(pieces[some], *given, found[some], table, *cells, reach, shared, own, packed),
        slices(pieces),
    )


def rotated_sums(payloads: Tensor, levels: Tensor, sums: Tensor) -> None:
    if not payloads.numel():
        return
    packed, stride = rows_of_bytes(payloads)
    size = payloads.shape[1]
    _sums(packed, len(payloads), stride, size, array(levels), array(sums), sums.numel() > 2 * size)


def rotated_decode(
    pieces: Int64Array,
    sums: Tensor,
    count: int,
    scales: Tensor,
    levels: Tensor,
    reach: float,
    shared: UInt64Array,
    out: Tensor,
) -> None:
    positions = int(pieces[-1, 2] + pieces[-1, 3]) if len(pieces) else 0
    wide, grain = sums.numel() > positions, int(levels[-1])
    given, of_pieces, target = array(sums.contiguous()), array(scales), array(out)
    side_by_side(
        lambda some: _decode(pieces[some], given, wide, count, of_pieces[some], grain, reach, shared, target),
        slices(pieces),
    )


def slices(pieces: Int64Array) -> list[slice]:
    """Of the pieces, for a thread each; where they are packed, none shares a byte with another."""
    return [slice(*rows) for rows in ranges(len(pieces), int(pieces[:, 2].sum()))]


@compiled
def longest(pieces: Int64Array) -> int:
    """Values of the largest rotation."""
    most = 0
    for number in range(len(pieces)):
        most = max(most, pieces[number, 2])
    return most


@compiled
def _hadamard(values: Float32Array, size: int) -> None:
    """The reference's transform in place: what it moves about between two stages stays where it is here.

    A stage adds and subtracts values half a span apart, from the widest span to that of two; three stages are one pass.
    """
    span = size
    while span >= 8 * _LANES:
        eighth = span // 8
        for first in range(0, size, span):
            for i in range(first, first + eighth, _LANES):
                _mix_eight(values, i, eighth)
        span = eighth
    while span > _LANES:
        half = span // 2
        for first in range(0, size, span):
            for i in range(first, first + half, _LANES):
                _mix_two(values, i, half)
        span = half
    for i in range(0, size, _LANES):
        _mix_within(values, i)


@intrinsic
def _mix_eight(typing_context: Any, values: Any, index: Any, step: Any) -> Any:
    """Three stages over eight vectors, ``step`` elements apart."""
    return types.void(values, types.intp, types.intp), _mixing(8)


@intrinsic
def _mix_two(typing_context: Any, values: Any, index: Any, step: Any) -> Any:
    """One stage over two vectors, ``step`` elements apart."""
    return types.void(values, types.intp, types.intp), _mixing(2)


def _mixing(count: int) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array_type, (values, index, step) = signature.args[0], args
        places = []
        for _ in range(count):
            places.append(element_pointer(context, builder, array_type, values, index, _VECTOR))
            index = builder.add(index, step)
        mixed = [builder.load(place, align=4) for place in places]
        apart = count // 2
        while apart:
            for low in range(count):
                if not low & apart:
                    first, second = mixed[low], mixed[low | apart]
                    mixed[low], mixed[low | apart] = builder.fadd(first, second), builder.fsub(first, second)
            apart //= 2
        for place, vector in zip(places, mixed, strict=True):
            builder.store(vector, place, align=4)
        return context.get_dummy_value()

    return generate


@intrinsic
def _mix_within(typing_context: Any, values: Any, index: Any) -> Any:
    """The last stages, within one vector."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = element_pointer(context, builder, signature.args[0], args[0], args[1], _VECTOR)
        vector = builder.load(place, align=4)
        apart = _LANES // 2
        while apart:
            lanes = range(_LANES)
            other = builder.shuffle_vector(vector, vector, _order([lane ^ apart for lane in lanes]))
            total, difference = builder.fadd(vector, other), builder.fsub(other, vector)
            chosen = _order([lane + _LANES * bool(lane & apart) for lane in lanes])
            vector = builder.shuffle_vector(total, difference, chosen)
            apart //= 2
        builder.store(vector, place, align=4)
        return context.get_dummy_value()

    return types.void(values, types.intp), generate


def _order(lanes: list[int]) -> ir.Constant:
    return ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes)


@compiled
def _flip(values: Float32Array, size: int, counter: int, key: np.uint64) -> None:
    """Gives each value its random sign."""
    low, high = halves(key)
    for first in range(0, size, LANES):
        signs = hash32(low, high, np.uint32(counter + first))
        for i in range(first, min(first + LANES, size), _LANES):
            _flip_vector(values, i, np.uint8(signs))
            signs >>= np.uint32(_LANES)


@intrinsic
def _flip_vector(typing_context: Any, values: Any, index: Any, byte: Any) -> Any:
    """Flips the signs of the values whose bit is set."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words = ir.VectorType(ir.IntType(32), _LANES)
        place = element_pointer(context, builder, signature.args[0], args[0], args[1], words)
        flipped = builder.sext(builder.bitcast(args[2], ir.VectorType(ir.IntType(1), _LANES)), words)
        signs = builder.and_(flipped, words([1 << 31] * _LANES))
        builder.store(builder.xor(builder.load(place, align=4), signs), place, align=4)
        return context.get_dummy_value()

    return types.void(values, types.intp, types.uint8), generate


@allocating
def _scales(pieces: Int64Array, values: Float32Array, scales: Float32Array) -> None:
    lanes = np.empty((2, LANES), np.float64)
    for number in range(len(pieces)):
        start, length, size = pieces[number, 0], pieces[number, 1], pieces[number, 2]
        piece = values[start : start + length]
        scale = math.sqrt(total_square(piece, lanes) / size)
        scales[number] = np.float32(scale if scale >= SMALLEST_SCALE else 0.0)


@allocating
def _encode(
    pieces: Int64Array,
    values: Float32Array,
    memory: Float32Array,
    keeps: bool,
    scales: Float32Array,
    table: Float32Array,
    lower: Int32Array,
    floors: Float32Array,
    widths: Float32Array,
    reach: float,
    shared: UInt64Array,
    own: UInt64Array,
    payload: UInt8Array,
) -> None:
    grain = lower.size
    middle = np.float32(grain / 2)
    most = longest(pieces)
    rotated = np.empty(most, np.float32)
    codes, uniform = np.empty(most, np.int32), np.empty(most, np.float32)
    for number in range(len(pieces)):
        start, length, size, position, counter, run = pieces[number]
        scale = scales[number]
        if not np.isfinite(scale) or scale == 0:
            continue
        piece = values[start : start + length]
        for i in range(length):
            rotated[i] = piece[i] / scale
        rotated[length:size] = 0
        _flip(rotated, size, counter, shared[run])
        _hadamard(rotated, size)
        low, high = halves(own[run])
        factor = np.float32(grain / (2 * reach * math.sqrt(size)))
        for i in range(size):
            at = rotated[i] * factor + middle
            at = max(at, np.float32(0))
            rotated[i] = min(at, np.float32(grain))
        for i in range(size):
            random = hash32(low, high, np.uint32(counter + i)) >> np.uint32(16)
            uniform[i] = np.float32(random) * np.float32(2.0**-16) + np.float32(2.0**-17)
        for i in range(size):
            cell = np.uint32(min(np.int32(rotated[i]), np.int32(grain - 1)))
            codes[i] = lower[cell] + np.int32(uniform[i] * widths[cell] < rotated[i] - floors[cell])
        packed = payload[position // 2 : (position + size) // 2]
        for i in range(packed.size):
            packed[i] = np.uint8(codes[2 * i] | (codes[2 * i + 1] << 4))
        if keeps:
            for i in range(size):
                rotated[i] = table[np.uint32(codes[i])] - middle
            _hadamard(rotated, size)
            _restore(rotated, size, scale, counter, shared[run], reach, grain, 1)
            kept = memory[start : start + length]
            for i in range(length):
                left = kept[i] - rotated[i]
                kept[i] = left if abs(left) < np.float32(np.inf) else kept[i]


@compiled
def _restore(
    values: Float32Array,
    size: int,
    scale: np.float32,
    counter: int,
    key: np.uint64,
    reach: float,
    grain: int,
    count: int,
) -> None:
    """See ``_restored`` of the reference, after the transform."""
    factor = np.float32(scale * np.float32(2 * reach / (grain * math.sqrt(size) * count)))
    largest = np.float32(LARGEST)
    for i in range(size):
        values[i] = min(max(values[i] * factor, -largest), largest)
    _flip(values, size, counter, key)


@allocating
def _sums(
    packed: UInt8Array, count: int, stride: int, size: int, levels: UInt8Array, sums: UInt8Array, wide: bool
) -> None:
    """Writes sums of a byte each, or of two if ``wide``."""
    wide_sums = sums.view(np.uint16)
    pairs = np.empty(256, np.uint32)
    for byte in range(256):
        pairs[byte] = np.uint32(levels[byte & 15]) | (np.uint32(levels[byte >> 4]) << np.uint32(16))
    for i in range(size):
        total = np.uint32(0)
        for row in range(count):
            total += pairs[packed[row * stride + i]]
        if wide:
            wide_sums[2 * i] = total & np.uint32(0xFFFF)
            wide_sums[2 * i + 1] = total >> np.uint32(16)
        else:
            sums[2 * i] = total & np.uint32(0xFFFF)
            sums[2 * i + 1] = total >> np.uint32(16)


@allocating
def _decode(
    pieces: Int64Array,
    sums: UInt8Array,
    wide: bool,
    count: int,
    scales: Float32Array,
    grain: int,
    reach: float,
    shared: UInt64Array,
    out: Float32Array,
) -> None:
    wide_sums = sums.view(np.uint16)
    most = longest(pieces)
    rotated = np.empty(most, np.float32)
    middle = np.float32(count * grain / 2)
    for number in range(len(pieces)):
        start, length, size, position, counter, run = pieces[number]
        scale = scales[number]
        if not np.isfinite(scale):
            out[start : start + length] = np.nan
            continue
        mean = out[start : start + length]
        if wide:
            for i in range(size):
                rotated[i] = np.float32(wide_sums[position + i]) - middle
        else:
            for i in range(size):
                rotated[i] = np.float32(sums[position + i]) - middle
        _hadamard(rotated, size)
        _restore(rotated, size, scale, counter, shared[run], reach, grain, count)
        for i in range(length):
            mean[i] = rotated[i]
