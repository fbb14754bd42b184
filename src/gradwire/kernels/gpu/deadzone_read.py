"""Codes of gaps and levels, read: where one begins is known when the one before is, so that a lane reads a tile."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.gpu._deadzone import (
    AS_IT_IS,
    CODE,
    ESCAPE,
    ESCAPED,
    ESCAPED_BITS,
    LEVEL_BITS,
    LONGEST,
    NEGATIVE_LEVEL,
    RAW,
    code_tables,
    context_of,
    first_of,
    following,
    stands_for,
    width_of,
)
from gradwire.kernels.gpu._jitted import negated, tile_of
from gradwire.kernels.gpu._launch import jitted, launch, tiles_of
from gradwire.kernels.reference.deadzone import HEAD
from gradwire.kernels.reference.deadzone import tiles_of as number_of_tiles
from gradwire.layout import Block

ROOM = 2**29
"""Bytes that levels take while they are read: of so many rows at once as it holds, and of one at least."""

LANES = ((2**14, 32), (2**12, 16), (0, 8))
"""From so many tiles on, how many a program reads, a lane each: more of them wait for one another's memory, fewer leave
lanes idle, of which there are enough where tiles are few."""

TURNS = 8
"""Codes that a lane reads before the program looks whether any is left."""

_MOST = tl.constexpr(2**31 - 1)
"""Bits: more than any tile's codes take."""

_FAR = tl.constexpr(59)
"""Classes from here on are of gaps that no tile has, and that 32 bits need not hold."""


def deadzone_decode(block: Block, payloads: Tensor, tile: int, out: Tensor, weight: float) -> None:
    if not block.numel:
        return
    tiles, device, head = tiles_of(block, out.device), out.device, 4 * block.segment_count
    count, rows = number_of_tiles(block, tile), len(payloads)
    at_once = max(min(rows, ROOM // (8 * block.numel)), 1)
    lanes = next(lanes for least, lanes in LANES if at_once * count >= least)
    programs = triton.cdiv(count, lanes)
    _, _, symbols = code_tables(device)
    levels = torch.empty(at_once, block.numel, dtype=torch.int32, device=device)
    raw = torch.empty(at_once, block.numel, dtype=torch.float32, device=device)
    for first in range(0, rows, at_once):
        words = payloads[first : first + at_once].view(torch.int32)
        sizes = words[:, (head + HEAD) // 4 :][:, :count].long() & 0xFFFFFFFF
        body = words[:, (head + HEAD) // 4 + count :]
        levels.zero_()
        read = (sizes.cumsum(1), sizes, body, body.shape[1], body.stride(0), symbols, tile, count, block.numel)
        launch(_read, len(words) * programs, *read, programs, levels, raw, LANES=lanes, TURNS=TURNS, warps=1)
        steps, points = words.view(torch.float32), payloads[first:, head:]
        added = (tiles.table, tiles.bases, levels, raw, block.numel, steps, words.stride(0), points, out)
        last = weight if first + len(words) == rows else 1.0
        launch(_add, tiles.count, *added, len(words), last, FIRST=not first, **tiles.shape)


@triton.jit
def _from(low, high, width):
    """32 bits of 64, from one of the lower half on."""
    return (low >> width.to(tl.uint32)) | ((high << 1) << (31 - width).to(tl.uint32))


@triton.jit
def _word(words, at, count, mask):
    return tl.load(words + at, mask=mask & (at < count), other=0).to(tl.uint32, bitcast=True)


@triton.jit
def _chosen(number, none, one, two, three):
    return tl.where(number > 1, tl.where(number > 2, three, two), tl.where(number > 0, one, none))


@jitted("sizes", "words", "count_of_words", "stride", "tile", "count", "numel", "programs")
def _read(
    stops,
    sizes,
    words,
    count_of_words,
    stride,
    symbols,
    tile,
    count,
    numel,
    programs,
    levels,
    raw,
    LANES: tl.constexpr,
    TURNS: tl.constexpr,
):
    """Leaves the level of each value that is sent, with its sign, or that it is sent as it is.

    A code, what it says of the gap and of the level are 86 bits at most, of four words that a lane has at hand: where
    the next code begins is known when its symbol is, and only where that is in another word is one fetched.
    """
    row = (tl.program_id(0) // programs).to(tl.int64)
    lane = (tl.program_id(0) % programs) * LANES + tl.arange(0, LANES)
    mask = lane < count
    begin = tl.load(stops + row * count + lane, mask=mask, other=0)
    size = tl.load(sizes + row * count + lane, mask=mask, other=0)
    begin -= size
    words += row * stride
    word = tl.minimum(begin >> 5, count_of_words).to(tl.int32)
    shift = (begin & 31).to(tl.int32)
    left = tl.minimum(size, _MOST).to(tl.int32)
    first = lane.to(tl.int64) * tile
    count_of_values = tl.minimum(numel - first, tile).to(tl.int32)
    levels += row * numel + first
    raw += row * numel + first
    place = tl.full((LANES,), -1, tl.int32)
    activity = tl.zeros((LANES,), tl.int32)
    live = mask & (left > 0)
    next0 = _word(words, word, count_of_words, live)
    next1 = _word(words, word + 1, count_of_words, live)
    next2 = _word(words, word + 2, count_of_words, live)
    next3 = _word(words, word + 3, count_of_words, live)
    while tl.max(live.to(tl.int32), axis=0) > 0:
        for _ in range(TURNS):
            w0 = _from(next0, next1, shift)
            w1 = _from(next1, next2, shift)
            w2 = _from(next2, next3, shift)
            entry = tl.load(symbols + (context_of(activity) << LONGEST) + (w0 & CODE).to(tl.int32)).to(tl.int32)
            width = (entry >> LONGEST) & 15
            symbol = entry & CODE
            escaped = symbol == ESCAPE
            symbol = tl.where(escaped, ((w0 >> width.to(tl.uint32)) & ESCAPED).to(tl.int32), symbol)
            width += tl.where(escaped, ESCAPED_BITS, 0)
            gap_class = symbol >> LEVEL_BITS
            level_class = symbol & RAW
            activity = following(activity, gap_class, level_class)
            as_it_is = level_class == RAW
            gap_width = width_of(gap_class)
            level_width = width_of(level_class)
            taken = width + gap_width + tl.where(as_it_is, 32, level_width + 1)
            w0 = _from(w0, w1, width)
            w1 = _from(w1, w2, width)
            gap = first_of(gap_class) + (w0.to(tl.int32, bitcast=True) & ((1 << gap_width) - 1))
            place += tl.where(gap_class < _FAR, gap, 1 << 30)
            w0 = _from(w0, w1, gap_width)
            level = first_of(level_class) + ((w0 >> 1).to(tl.int32, bitcast=True) & ((1 << level_width) - 1))
            level = tl.where((w0 & 1) != 0, level | NEGATIVE_LEVEL, level)
            live = live & (place < count_of_values)
            tl.store(levels + place, tl.where(as_it_is, AS_IT_IS, level), mask=live)
            tl.store(raw + place, w0.to(tl.float32, bitcast=True), mask=live & as_it_is)
            left -= taken
            live = live & (left > 0)
            shift += taken
            passed = shift >> 5
            shift = shift & 31
            word += passed
            new1 = _word(words, word + 1, count_of_words, live & (passed > 2))
            new2 = _word(words, word + 2, count_of_words, live & (passed > 1))
            new3 = _word(words, word + 3, count_of_words, live & (passed > 0))
            next0 = _chosen(passed, next0, next1, next2, next3)
            next1 = _chosen(passed, next1, next2, next3, new1)
            next2 = _chosen(passed, next2, next3, new2, new2)
            next3 = tl.where(passed > 0, new3, next3)


@jitted("numel", "steps", "stride", "points", "rows", "weight")
def _add(
    table,
    bases,
    levels,
    raw,
    numel,
    steps,
    stride,
    points,
    out,
    rows,
    weight,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    start, count, _, segment, _ = tile_of(table, ALIGNED)
    i = tl.arange(0, WIDTH)
    mask = i < count
    base = tl.load(bases + tl.program_id(0)).to(tl.int64)
    total = tl.zeros((WIDTH,), tl.float32)
    if not FIRST:
        total = tl.load(out + start + i, mask=mask, other=0.0)
    for row in range(rows):
        apart = tl.cast(row, tl.int64) * stride
        at = tl.cast(row, tl.int64) * numel + base + i
        word = tl.load(levels + at, mask=mask, other=0)
        step = tl.broadcast_to(tl.load(steps + apart + segment + tl.arange(0, 1)), (WIDTH,))
        first = (tl.load(points + 4 * apart).to(tl.float32) - 128) * 0.00390625
        second = (tl.load(points + 4 * apart + 1).to(tl.float32) - 128) * 0.00390625
        others = (tl.load(points + 4 * apart + 2).to(tl.float32) - 128) * 0.00390625
        level = word & (NEGATIVE_LEVEL - 1)
        coarse = negated(stands_for(level, first, second, others, step), (word & NEGATIVE_LEVEL) != 0)
        as_it_is = word == AS_IT_IS
        value = tl.load(raw + at, mask=mask & as_it_is, other=coarse)
        value = tl.where(step == step, tl.where(word == 0, 0.0, value), float("nan"))
        total += value
    tl.store(out + start + i, total * weight, mask=mask)
