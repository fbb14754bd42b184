"""Encodes and decodes a block tile by tile, whatever the code: one kernel for each stage, compiled for each code.

Where every segment is one tile, as with buckets of 512 values, one program measures and writes it. Else programs
measure tiles, one for each segment adds up what they found, in the order the reference defines, and tiles are read
again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from gradwire.kernels.code import Code
from gradwire.kernels.compensated import Compensated
from gradwire.kernels.gpu._jitted import INFINITY, NEGATIVE, compensated, hash32, key_of_run, tile_of
from gradwire.kernels.gpu._launch import halves, jitted, launch, tiles_of, warps
from gradwire.kernels.gpu._measured import Jitted, measure, statistics, store_scale
from gradwire.kernels.gpu._packed import NINE, TRITS, pack, unpack
from gradwire.layout import Block

WIDEST_WITH_SUMS = 512
"""A tile that is measured and written by one program, if its measure is a sum: more would leave warps idle."""

CODES: dict[type, Callable[[Any], Jitted]] = {}
"""What a code is to the kernels, by its class."""


def encode(code: Code, block: Block, source: Compensated, payload: Tensor, key: int) -> None:
    words, size, _ = code.layout(block.positions)
    head = 4 * words * block.segment_count
    scales = payload[:head].view(torch.float32)
    put_all(code, block, source, scales, payload[head:], size, key, agreed=False)


def decode(code: Code, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
    words, _, _ = code.layout(block.positions)
    bodies = payloads[:, 4 * words * block.segment_count :]
    read_all(code, block, payloads, payloads.stride(0), bodies, len(payloads), out, weight)


def put_all(
    code: Code, block: Block, source: Compensated, scales: Tensor, body: Tensor, size: int, key: int, agreed: bool
) -> None:
    """Writes a body, zeros after its ``size`` bytes, and the scales unless they are agreed."""
    gradient, residual, beta, gamma = source
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
        measure(own, code, block, source, scales)
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


def _table(own: Jitted, near: Tensor) -> Tensor:
    return near if own.table is None else own.table(near.device)


def _distance(own: Jitted, code: Code, block: Block) -> int:
    """How far apart bytes are that hold more of the same position, or of another one that shares a byte with it."""
    size = code.layout(block.positions).body
    return block.positions if own.bits == NINE else size


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
        first, second, peak, negatives = statistics(
            gradient, residual, start, count, beta, gamma, CODE, TERMS, KEEP, WIDTH
        )
        numel = tl.load(numels + segment + one)
        low, high = store_scale(scales, segment, first, second, peak, negatives, numel, CODE, SCALE, WORDS)
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
    pack(body, position, i, code, count, distance, BITS, WIDTH)


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
        codes = unpack(body, position, count, distance, BITS, WIDTH)
        total += READ(CODE, codes, low, high, looked_up)
        body += stride
        scale += scales_stride
    tl.store(out + start + i, total * weight, mask=i < count)
