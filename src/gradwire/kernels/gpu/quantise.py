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

from gradwire.kernels.code import TRITS, Code
from gradwire.kernels.compensated import Compensated
from gradwire.kernels.gpu._jitted import INFINITY, NEGATIVE, compensated, hash32, key_of_run, place_of, tile_of
from gradwire.kernels.gpu._launch import halves, jitted, launch, tiles_of, warps
from gradwire.kernels.gpu._measured import Jitted, measure, statistics, store_scale
from gradwire.kernels.gpu._packed import code_of, codes_a_unit, joined, load_units, pack, units_of
from gradwire.layout import Block

WIDEST_WITH_SUMS = 512
"""A tile that is measured and written by one program, if its measure is a sum: more would leave warps idle."""

AT_ONCE = 2
"""Payloads of which codes are loaded before the first are added."""

CODES: dict[type, Callable[[Any], Jitted]] = {}
"""What a code is to the kernels, by its class."""


def encode(code: Code, block: Block, source: Compensated, payload: Tensor, key: int) -> None:
    encode_each(code, (block,), source, payload[None], key)


def encode_each(code: Code, blocks: tuple[Block, ...], source: Compensated, payloads: Tensor, key: int) -> None:
    """A payload for each of some blocks of one buffer, in rows with zeros after it: the same launches as for one."""
    layout = code.layout
    heads = [4 * layout.words * block.segment_count for block in blocks]
    least = min(head + layout.body(block.positions) for head, block in zip(heads, blocks, strict=True))
    if layout.bits == TRITS:
        payloads.zero_()
    elif least < payloads.shape[1]:
        payloads[:, least:].zero_()
    scales, body = payloads[0].view(torch.float32), payloads[0, heads[0] :]
    put_all(code, blocks, source, scales, body, payloads.stride(0), key, agreed=False)


def decode(code: Code, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
    bodies = payloads[:, 4 * code.layout.words * block.segment_count :]
    read_all(code, (block,), 0, payloads, payloads.stride(0), bodies, out, weight)


def decode_each(code: Code, blocks: tuple[Block, ...], payloads: Tensor, out: Tensor) -> None:
    """What :func:`encode_each` wrote, in one launch."""
    body = payloads[:1, 4 * code.layout.words * blocks[0].segment_count :]
    read_all(code, blocks, payloads.stride(0), payloads, 0, body, out, 1.0)


def put_all(
    code: Code,
    blocks: tuple[Block, ...],
    source: Compensated,
    scales: Tensor,
    body: Tensor,
    stride: int,
    key: int,
    agreed: bool,
) -> None:
    """Writes bodies, and the scales unless they are agreed, of blocks whose payloads lie so many bytes apart."""
    gradient, residual, beta, gamma = source
    own, (words, bits, mark) = CODES[type(code)](code), code.layout
    code = own.constant or code
    tiles = tiles_of(blocks[0], gradient.device, *blocks[1:])
    if not words:
        scales = torch.empty(tiles.segment_count, device=gradient.device)
    values = (gradient, gradient if residual is None else residual)
    fused = tiles.whole and (own.terms is None or tiles.width <= WIDEST_WITH_SUMS)
    if not agreed and not fused:
        measure(own, code, tiles, source, scales, stride)
    launch(
        _write,
        tiles.count,
        tiles.table,
        *values,
        scales,
        body,
        _table(own, gradient),
        tiles.numels,
        tiles.payloads(code, stride),
        *halves(key),
        beta,
        gamma,
        CODE=code,
        SCALE=own.scale,
        TERMS=own.terms,
        PUT=own.put,
        READ=own.read,
        BITS=bits,
        WORDS=max(words, 1),
        MARK=mark,
        UNIT=4 if (body.data_ptr() | stride) % 4 == 0 else 1,
        DRAWS=own.draws,
        KEEP=residual is not None,
        MEASURE=fused and not agreed,
        **tiles.shape,
    )


def read_all(
    code: Code,
    blocks: tuple[Block, ...],
    stride: int,
    scales: Tensor,
    scales_stride: int,
    bodies: Tensor,
    out: Tensor,
    weight: float,
) -> None:
    """Writes the weighted sum of rows of payloads.

    Args:
        code: As written.
        blocks: Whose payloads each row has, one after another.
        stride: How many bytes those lie apart.
        scales: From the first payload's on, as bytes.
        scales_stride: Bytes from a row's to the next one's.
        bodies: ``uint8[rows, b]``, from the first payload's on.
        out: ``float32`` flat buffer.
        weight: Of the sum.
    """
    own, tiles = CODES[type(code)](code), tiles_of(blocks[0], out.device, *blocks[1:])
    code = own.constant or code
    bits, places = code.layout.bits, tiles.payloads(code, stride)
    starts = bodies.data_ptr() | bodies.shape[1] | stride | (bodies.stride(0) if len(bodies) > 1 else 0)
    unit = 4 if starts % 4 == 0 and tiles.grain * min(bits, 4) % 32 == 0 else 1
    each = codes_a_unit(bits, unit)
    launch(
        _decode,
        tiles.count,
        tiles.table,
        scales,
        scales_stride,
        bodies,
        bodies.stride(0),
        len(bodies),
        places,
        _table(own, out),
        out,
        weight,
        CODE=code,
        READ=own.read,
        BITS=bits,
        WORDS=code.layout.words,
        UNIT=unit,
        EACH=each,
        ROWS=AT_ONCE,
        **tiles.shape | {"warps": min(warps(tiles.width), max(tiles.width // each // 32, 1))},
    )


def _table(own: Jitted, near: Tensor) -> Tensor:
    return near if own.table is None else own.table(near.device)


@jitted("scales", "body", "key_low", "key_high", "beta", "gamma")
def _write(
    table,
    gradient,
    residual,
    scales,
    body,
    looked_up,
    numels,
    places,
    key_low,
    key_high,
    beta,
    gamma,
    CODE: tl.constexpr,
    SCALE: tl.constexpr,
    TERMS: tl.constexpr,
    PUT: tl.constexpr,
    READ: tl.constexpr,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    MARK: tl.constexpr,
    UNIT: tl.constexpr,
    DRAWS: tl.constexpr,
    KEEP: tl.constexpr,
    MEASURE: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    start, count, position, segment, row = tile_of(table, ALIGNED, BACK=not MEASURE)
    before, offset, distance = place_of(places, row)
    scales += before
    body += offset
    one = tl.arange(0, 1)
    if MEASURE:
        first, second, peak, negatives = statistics(
            gradient, residual, start, count, beta, gamma, CODE, TERMS, KEEP, False, WIDTH
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
    first = tl.where(finite, low, 1.0)
    second = tl.where(finite, high, 1.0)
    code = PUT(CODE, t, first, second, random, looked_up)
    if KEEP:
        left = tl.where(finite, t - READ(CODE, code, first, second, looked_up), t)
        tl.store(residual + start + i, tl.where(tl.abs(left) < INFINITY, left, r), mask=mask)
    code = tl.where(mask, tl.where(finite, code, MARK), 0)
    pack(body, position, i, code, count, distance, BITS, UNIT, WIDTH)


@jitted("scales", "scales_stride", "bodies", "stride", "rows", "weight")
def _decode(
    table,
    scales,
    scales_stride,
    bodies,
    stride,
    rows,
    places,
    looked_up,
    out,
    weight,
    CODE: tl.constexpr,
    READ: tl.constexpr,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    UNIT: tl.constexpr,
    EACH: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    start, count, position, segment, row = tile_of(table, ALIGNED)
    before, offset, distance = place_of(places, row)
    COUNT: tl.constexpr = WIDTH // EACH
    one = tl.arange(0, 1)
    low = tl.full((COUNT,), 1.0, tl.float32)
    high = low
    totals = ()
    for _ in tl.static_range(EACH):  # -0.0, to which all adds as it is
        totals += (tl.full((COUNT,), NEGATIVE, tl.int32).to(tl.float32, bitcast=True),)  # type: ignore[assignment]
    scale = scales + 4 * (WORDS * segment + before)
    at, mask, besides = units_of(bodies + offset, position, count.to(tl.int32), distance, BITS, UNIT, EACH, COUNT)
    for _ in tl.range(rows, loop_unroll_factor=ROWS):
        if WORDS > 0:
            words = scale.to(tl.pointer_type(tl.float32)) + one
            low = tl.broadcast_to(tl.load(words), (COUNT,))
            high = tl.broadcast_to(tl.load(words + (WORDS - 1)), (COUNT,))
        units = load_units(at, mask, UNIT)
        beside = besides
        if BITS == 9:
            beside = load_units(besides, mask, 1) >> (tl.arange(0, COUNT) * EACH % 8)
            besides += stride
        added = ()
        for k in tl.static_range(EACH):
            added += (totals[k] + READ(CODE, code_of(units, beside, k, BITS), low, high, looked_up),)  # type: ignore[assignment]
        totals = added
        at += stride
        scale += scales_stride
    weighted = ()
    for k in tl.static_range(EACH):
        weighted += (totals[k] * weight,)  # type: ignore[assignment]
    i = tl.arange(0, WIDTH)
    tl.store(out + start + i, tl.reshape(joined(weighted, EACH), (WIDTH,)), mask=i < count)
