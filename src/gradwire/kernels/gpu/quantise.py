"""Encodes and decodes a block tile by tile, whatever the code: one kernel for each stage, compiled for each code.

Where every segment is one tile, as with buckets of 512 values, one program measures and writes it. Else programs
measure tiles, one for each segment adds up what they found, in the order the reference defines, and tiles are read
again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.code import Code
from gradwire.kernels.gpu._jitted import (
    INFINITE,
    INFINITY,
    LANES,
    NEGATIVE,
    compensated,
    hash32,
    key_of_run,
    magnitude_bits,
    sum_of_lanes,
    tile_of,
)
from gradwire.kernels.gpu._launch import halves, jitted, launch, tiles_of, warps
from gradwire.layout import Block

TRITS = 5
"""The packing of five digits of base 3 a byte."""

NINE = 9
"""The packing of a byte a position, and a ninth bit for each after all of them."""

WIDEST_WITH_SUMS = 512
"""A tile that is measured and written by one program, if its measure is a sum: more would leave warps idle."""


class Jitted(NamedTuple):
    """What a code is to the kernels: functions that are jitted, and constants; all take the code as a constant first.

    Attributes:
        bits: How codes are packed: 1, 2, 4 or 8 bits, ``NINE`` or ``TRITS``.
        scale: ``(code, first, second, peak, negatives, numel)``: the words of a finite segment, two of them, from sums
            of terms, the bits of the largest magnitude, and counts; all are blocks of one number.
        put: ``(code, t, first, second, random, table)``: a code for each value, and what it stands for.
        read: ``(code, codes, first, second, table)``: what codes stand for.
        terms: ``(code, t)``: two numbers of float64 that are added up over a segment, or None.
        draws: Whether ``put`` is given random bits.
        table: Numbers that ``put`` and ``read`` look up, on a device.
    """

    bits: int
    scale: Any
    put: Any
    read: Any
    terms: Any = None
    draws: bool = False
    table: Callable[[torch.device], Tensor] | None = None


CODES: dict[type, Callable[[Any], Jitted]] = {}
"""What a code is to the kernels, by its class."""


def encode(
    code: Code,
    block: Block,
    gradient: Tensor,
    residual: Tensor | None,
    beta: float,
    gamma: float,
    payload: Tensor,
    key: int,
) -> None:
    words, size, _ = code.layout(block.positions)
    head = 4 * words * block.segment_count
    scales = payload[:head].view(torch.float32)
    put_all(code, block, gradient, residual, beta, gamma, scales, payload[head:], size, key, agreed=False)


def decode(code: Code, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
    words, _, _ = code.layout(block.positions)
    bodies = payloads[:, 4 * words * block.segment_count :]
    read_all(code, block, payloads, payloads.stride(0), bodies, len(payloads), out, weight)


def put_all(
    code: Code,
    block: Block,
    gradient: Tensor,
    residual: Tensor | None,
    beta: float,
    gamma: float,
    scales: Tensor,
    body: Tensor,
    size: int,
    key: int,
    agreed: bool,
) -> None:
    """Writes a body, zeros after its ``size`` bytes, and the scales unless they are agreed."""
    own, tiles, (words, _, mark) = CODES[type(code)](code), tiles_of(block, gradient.device), code.layout(0)
    if not words:
        scales = torch.empty(block.segment_count, device=gradient.device)
    if own.bits == TRITS:
        body.zero_()
    elif size < len(body):
        body[size:].zero_()
    values = (gradient, gradient if residual is None else residual)
    fused = tiles.whole and (own.terms is None or tiles.width <= WIDEST_WITH_SUMS)
    if not agreed and not fused:
        measure(own, code, block, gradient, residual, beta, gamma, scales)
    launch(
        _write,
        tiles.count,
        tiles.table,
        *values,
        scales,
        body,
        _table(own, gradient),
        tiles.numels,
        _distance(own, code, block),
        *halves(key),
        beta,
        gamma,
        CODE=code,
        SCALE=own.scale,
        TERMS=own.terms,
        PUT=own.put,
        BITS=own.bits,
        WORDS=max(words, 1),
        MARK=mark,
        DRAWS=own.draws,
        KEEP=residual is not None,
        MEASURE=fused and not agreed,
        WIDTH=tiles.width,
        ALIGNED=tiles.aligned,
        warps=warps(tiles.width),
    )


def read_all(
    code: Code, block: Block, scales: Tensor, scales_stride: int, bodies: Tensor, rows: int, out: Tensor, weight: float
) -> None:
    """Writes the weighted sum of payloads, whose scales and bodies lie so many bytes apart."""
    own, tiles = CODES[type(code)](code), tiles_of(block, out.device)
    launch(
        _decode,
        tiles.count,
        tiles.table,
        scales,
        scales_stride,
        bodies,
        bodies.stride(0),
        rows,
        _distance(own, code, block),
        _table(own, out),
        out,
        weight,
        CODE=code,
        READ=own.read,
        BITS=own.bits,
        WORDS=code.layout(0).words,
        WIDTH=tiles.width,
        ALIGNED=tiles.aligned,
        warps=warps(tiles.width),
    )


def measure(
    own: Jitted,
    code: Code,
    block: Block,
    gradient: Tensor,
    residual: Tensor | None,
    beta: float,
    gamma: float,
    scales: Tensor,
) -> None:
    """Fills the scales of all segments, with NaN where a value is not finite."""
    tiles, device = tiles_of(block, gradient.device), gradient.device
    sums = torch.empty(2 * tiles.count if own.terms else 0, dtype=torch.float64, device=device)
    marks = torch.empty(2 * tiles.count, dtype=torch.int32, device=device)
    launch(
        _measure_tiles,
        tiles.count,
        tiles.table,
        gradient,
        gradient if residual is None else residual,
        sums,
        marks,
        beta,
        gamma,
        CODE=code,
        TERMS=own.terms,
        KEEP=residual is not None,
        WIDTH=tiles.width,
        ALIGNED=tiles.aligned,
        warps=1 if own.terms else warps(tiles.width),
    )
    launch(
        _add_up,
        block.segment_count,
        tiles.segments,
        tiles.runs,
        tiles.numels,
        sums,
        marks,
        scales,
        CODE=code,
        TERMS=own.terms,
        SCALE=own.scale,
        WORDS=max(code.layout(0).words, 1),
        warps=1,
    )


def _table(own: Jitted, near: Tensor) -> Tensor:
    return near if own.table is None else own.table(near.device)


def _distance(own: Jitted, code: Code, block: Block) -> int:
    """How far apart bytes are that hold more of the same position, or of another one that shares a byte with it."""
    size = code.layout(block.positions).body
    return block.positions if own.bits == NINE else size


@triton.jit
def _statistics(
    gradient,
    residual,
    start,
    count,
    beta,
    gamma,
    CODE: tl.constexpr,
    TERMS: tl.constexpr,
    KEEP: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Sums of terms, largest magnitude and number of negative values of a tile, each a block of one number."""
    if TERMS is None:
        i = tl.arange(0, WIDTH)
        t, _ = compensated(gradient, residual, start + i, i < count, beta, gamma, KEEP)
        peak = tl.max(magnitude_bits(t), axis=0, keep_dims=True)
        nothing = tl.zeros((1,), tl.float64)
        return nothing, nothing, peak, tl.zeros((1,), tl.int32)
    else:
        lane = tl.arange(0, LANES)
        first = tl.zeros((LANES,), tl.float64)
        second = tl.zeros((LANES,), tl.float64)
        peak = tl.zeros((LANES,), tl.int32)
        negatives = tl.zeros((LANES,), tl.int32)
        rows = ((count + (LANES - 1)) // LANES).to(tl.int32)
        for row in tl.range(0, rows, loop_unroll_factor=8):
            i = row * LANES + lane
            t, _ = compensated(gradient, residual, start + i, i < count, beta, gamma, KEEP)
            a, b = TERMS(CODE, t)
            first += a
            second += b
            peak = tl.maximum(peak, magnitude_bits(t))
            negatives += (t < 0).to(tl.int32)
        largest = tl.max(peak, axis=0, keep_dims=True)
        return sum_of_lanes(first), sum_of_lanes(second), largest, tl.sum(negatives, axis=0, keep_dims=True)


@jitted("beta", "gamma")
def _measure_tiles(
    table,
    gradient,
    residual,
    sums,
    marks,
    beta,
    gamma,
    CODE: tl.constexpr,
    TERMS: tl.constexpr,
    KEEP: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    start, count, _, _, _ = tile_of(table, ALIGNED)
    first, second, peak, negatives = _statistics(
        gradient, residual, start, count, beta, gamma, CODE, TERMS, KEEP, WIDTH
    )
    at = 2 * tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    if TERMS is not None:
        tl.store(sums + at, first)
        tl.store(sums + at + 1, second)
    tl.store(marks + at, peak)
    tl.store(marks + at + 1, negatives)


@triton.jit
def _add_up(
    segments,
    runs,
    numels,
    sums,
    marks,
    scales,
    CODE: tl.constexpr,
    TERMS: tl.constexpr,
    SCALE: tl.constexpr,
    WORDS: tl.constexpr,
):
    """One program a segment: tiles of a run in order, then runs in order."""
    segment = tl.program_id(0)
    one = tl.arange(0, 1)
    first_run = tl.load(segments + segment)
    last_run = tl.load(segments + segment + 1)
    first = tl.zeros((1,), tl.float64)
    second = tl.zeros((1,), tl.float64)
    if TERMS is not None:
        for run in range(first_run, last_run):
            first_of_run = tl.zeros((1,), tl.float64)
            second_of_run = tl.zeros((1,), tl.float64)
            for tile in tl.range(tl.load(runs + run), tl.load(runs + run + 1), loop_unroll_factor=16):
                first_of_run += tl.load(sums + 2 * tile + one)
                second_of_run += tl.load(sums + 2 * tile + 1 + one)
            first += first_of_run
            second += second_of_run
    i = tl.arange(0, 256)
    peak = tl.zeros((256,), tl.int32)
    negatives = tl.zeros((256,), tl.int32)
    last = tl.load(runs + last_run)
    for tile in range(tl.load(runs + first_run), last, 256):
        mask = tile + i < last
        peak = tl.maximum(peak, tl.load(marks + 2 * (tile + i), mask=mask, other=0))
        negatives += tl.load(marks + 2 * (tile + i) + 1, mask=mask, other=0)
    largest = tl.max(peak, axis=0, keep_dims=True)
    below = tl.sum(negatives, axis=0, keep_dims=True)
    _store_scale(scales, segment, first, second, largest, below, tl.load(numels + segment + one), CODE, SCALE, WORDS)


@triton.jit
def _store_scale(
    scales, segment, first, second, peak, negatives, numel, CODE: tl.constexpr, SCALE: tl.constexpr, WORDS: tl.constexpr
):
    """Writes the words of a segment, NaN if it is not finite, and returns them."""
    finite = peak < INFINITE
    low, high = SCALE(CODE, first, second, peak, negatives, numel)
    low = tl.where(finite, low, float("nan"))
    high = tl.where(finite, high, float("nan"))
    at = scales + WORDS * segment + tl.arange(0, 1)
    tl.store(at, low)
    if WORDS == 2:
        tl.store(at + 1, high)
    return low, high


@jitted("scales", "body", "distance", "key_low", "key_high", "beta", "gamma")
def _write(
    table,
    gradient,
    residual,
    scales,
    body,
    looked_up,
    numels,
    distance,
    key_low,
    key_high,
    beta,
    gamma,
    CODE: tl.constexpr,
    SCALE: tl.constexpr,
    TERMS: tl.constexpr,
    PUT: tl.constexpr,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    MARK: tl.constexpr,
    DRAWS: tl.constexpr,
    KEEP: tl.constexpr,
    MEASURE: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    start, count, position, segment, row = tile_of(table, ALIGNED)
    one = tl.arange(0, 1)
    if MEASURE:
        first, second, peak, negatives = _statistics(
            gradient, residual, start, count, beta, gamma, CODE, TERMS, KEEP, WIDTH
        )
        numel = tl.load(numels + segment + one)
        low, high = _store_scale(scales, segment, first, second, peak, negatives, numel, CODE, SCALE, WORDS)
    else:
        low = tl.load(scales + WORDS * segment + one)
        high = tl.load(scales + WORDS * segment + (WORDS - 1) + one)
    low = tl.broadcast_to(low, (WIDTH,))
    high = tl.broadcast_to(high, (WIDTH,))
    finite = tl.abs(low) < INFINITY
    i = tl.arange(0, WIDTH)
    mask = i < count
    t, r = compensated(gradient, residual, start + i, mask, beta, gamma, KEEP)
    random = tl.zeros((WIDTH,), tl.uint32)
    if DRAWS:
        key = key_of_run(key_low, key_high, tl.load(row + 4))
        random = hash32(key, (tl.load(row + 5) + i).to(tl.uint32))
    safe = tl.where(finite, t, 0.0)
    code, sent = PUT(CODE, safe, tl.where(finite, low, 1.0), tl.where(finite, high, 1.0), random, looked_up)
    if KEEP:
        left = tl.where(finite, t - sent, t)
        tl.store(residual + start + i, tl.where(tl.abs(left) < INFINITY, left, r), mask=mask)
    code = tl.where(mask, tl.where(finite, code, MARK), 0)
    _pack(body, position, i, code, count, distance, BITS, WIDTH)


@triton.jit
def _pack(body, position, i, code, count, distance, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """Writes the codes of a tile, 0 beyond it, up to a whole byte."""
    if BITS == 5:
        # digits of four positions, which lie in four bytes of one word
        number, _ = _row_and_byte(position + i, distance)
        group = tl.sum(tl.reshape((code * _power_of_3(number)) << (8 * (i % 4)), (WIDTH // 4, 4)), axis=1)
        first = 4 * tl.arange(0, WIDTH // 4)
        _, byte = _row_and_byte(position + first, distance)
        tl.atomic_add((body + byte).to(tl.pointer_type(tl.int32)), group, mask=first < count, sem="relaxed")
    elif BITS >= 8:
        covered = i < (count + 7) // 8 * 8
        tl.store(body + position + i, (code & 255).to(tl.uint8), mask=covered)
        if BITS == 9:
            _pack(body + distance, position, i, code >> 8, count, distance, 1, WIDTH)
    else:
        EACH: tl.constexpr = 8 // BITS
        byte = tl.arange(0, WIDTH // EACH)
        packed = tl.sum(tl.reshape(code << (BITS * (i % EACH)), (WIDTH // EACH, EACH)), axis=1)
        tl.store(body + position // EACH + byte, packed.to(tl.uint8), mask=byte * EACH < (count + 7) // 8 * 8)


@triton.jit
def _unpack(body, position, count, distance, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """The codes of a tile."""
    i = tl.arange(0, WIDTH)
    if BITS == 5:
        number, place = _row_and_byte(position + i, distance)
        packed = tl.load(body + place, mask=i < count, other=0).to(tl.int32)
        quotient = (packed * _reciprocal_of_power_of_3(number)) >> 16
        return quotient - ((quotient * 21846) >> 16) * 3
    elif BITS >= 8:
        code = tl.load(body + position + i, mask=i < count, other=0).to(tl.int32)
        if BITS == 9:
            code = code | _unpack(body + distance, position, count, distance, 1, WIDTH) << 8
        return code
    else:
        EACH: tl.constexpr = 8 // BITS
        byte = tl.arange(0, WIDTH // EACH)
        packed = tl.load(body + position // EACH + byte, mask=byte * EACH < count, other=0).to(tl.int32)
        codes = (packed[:, None] >> (BITS * tl.arange(0, EACH))[None, :]) & ((1 << BITS) - 1)
        return tl.reshape(codes, (WIDTH,))


@triton.jit
def _row_and_byte(position, distance):
    """Which digit of which byte a position is; comparing is cheaper than dividing."""
    far = tl.full((), 0, tl.int64) + distance
    row = (position >= far).to(tl.int32) + (position >= 2 * far).to(tl.int32)
    row += (position >= 3 * far).to(tl.int32) + (position >= 4 * far).to(tl.int32)
    return row, position - row * far


@triton.jit
def _power_of_3(number):
    """``3**number`` for a digit of a byte."""
    low = tl.where(number == 0, 1, tl.where(number == 1, 3, 9))
    return tl.where(number < 3, low, tl.where(number == 3, 27, 81))


@triton.jit
def _reciprocal_of_power_of_3(number):
    """``65536 / 3**number``, rounded up."""
    low = tl.where(number == 0, 65536, tl.where(number == 1, 21846, 7282))
    return tl.where(number < 3, low, tl.where(number == 3, 2428, 810))


@jitted("scales", "scales_stride", "bodies", "stride", "rows", "distance", "weight")
def _decode(
    table,
    scales,
    scales_stride,
    bodies,
    stride,
    rows,
    distance,
    looked_up,
    out,
    weight,
    CODE: tl.constexpr,
    READ: tl.constexpr,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    start, count, position, segment, _ = tile_of(table, ALIGNED)
    one = tl.arange(0, 1)
    i = tl.arange(0, WIDTH)
    total = tl.full((WIDTH,), NEGATIVE, tl.int32).to(tl.float32, bitcast=True)  # -0.0, to which all adds as it is
    body = bodies
    scale = scales + 4 * WORDS * segment
    low = tl.full((WIDTH,), 1.0, tl.float32)
    high = low
    for _ in range(rows):
        if WORDS > 0:
            words = scale.to(tl.pointer_type(tl.float32)) + one
            low = tl.broadcast_to(tl.load(words), (WIDTH,))
            high = tl.broadcast_to(tl.load(words + (WORDS - 1)), (WIDTH,))
        codes = _unpack(body, position, count, distance, BITS, WIDTH)
        total += READ(CODE, codes, low, high, looked_up)
        body += stride
        scale += scales_stride
    tl.store(out + start + i, total * weight, mask=i < count)
