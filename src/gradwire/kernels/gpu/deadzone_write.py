"""Codes of gaps and levels, written.

What is sent is gathered in order first. Then a code's context follows from those before it, which stretches of codes
find out side by side, a lane each; the codes themselves are written all at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.deferred import Flag, flag
from gradwire.kernels.gpu._deadzone import (
    ESCAPE,
    EVEN,
    FRESH,
    LEAST_ACTIVE,
    LEVEL_BITS,
    LIMIT,
    MOST_ACTIVE,
    NEGATIVE_LEVEL,
    RAW,
    ROUNDING,
    THRESHOLD,
    class_of,
    code_tables,
    context_of,
    ones,
    stands_for,
    turned,
    width_of,
)
from gradwire.kernels.gpu._jitted import negated, tile_of
from gradwire.kernels.gpu._launch import jitted, launch, tiles_of
from gradwire.kernels.gpu.deadzone import step_in
from gradwire.kernels.reference.deadzone import HEAD, deadzone_room
from gradwire.layout import Block

LEAST_BITS = 3
"""Of a value: the shortest code, and a sign."""

EIGHT = 8
"""Codes of a word; :data:`_WIDTH` is a multiple of it."""

STRETCH = 8
"""Words whose contexts a lane finds."""

AHEAD = 16
"""Words before them that it looks at first, to know how active they were."""

_LANES = 32
"""Stretches that a program goes through, a lane each."""

_WIDTH = 1024

_EIGHT = tl.constexpr(EIGHT)


def deadzone_encode(
    block: Block, values: Tensor, keeps: bool, steps: Tensor, points: tuple[int, int, int], tile: int, payload: Tensor
) -> Flag:
    head, device = 4 * block.segment_count, values.device
    edge = payload.numel() - deadzone_room(block, tile, payload)
    payload[head:].zero_()
    fitting = torch.empty((), dtype=torch.int64, device=device)
    words = payload.view(torch.int32)
    programs = triton.cdiv(block.segment_count + 1, _WIDTH)
    launch(_begin, programs, words, steps, block.segment_count, *points, fitting, WIDTH=_WIDTH)
    if not block.numel:
        return flag(True)
    tiles, room = tiles_of(block, device), 8 * (payload.numel() - edge)
    counts = torch.empty(tiles.count, dtype=torch.int64, device=device)
    launch(_count, tiles.count, tiles.table, values, steps, counts, **tiles.shape)
    ends, most = counts.cumsum(0), min(block.numel, room // LEAST_BITS + 1)
    kind = torch.int32 if block.numel + tile < 2**31 else torch.int64
    elements, levels, bits = (torch.empty(most, dtype=each, device=device) for each in (kind, torch.int32, torch.int32))
    launch(
        *(_collect, tiles.count, tiles.table, values, steps, tiles.bases, ends, most, elements, levels, bits),
        **tiles.shape,
    )
    all_of_them, (lengths, codewords, _) = ends[-1:], code_tables(device)
    symbols, widths, sums = _symbols_of(elements, levels, all_of_them, lengths, tile)
    written = (elements, levels, bits, symbols, widths, sums, sums.cumsum(0), all_of_them, lengths, codewords)
    places = (words[(head + HEAD) // 4 :], words[edge // 4 :], fitting)
    launch(_write, len(sums), *written, room, tile, most, *places, WIDTH=_WIDTH)
    if keeps:
        launch(_take, tiles.count, tiles.table, values, steps, ends, fitting, *_offsets(points), **tiles.shape)
    return fitting == all_of_them[0]


def _symbols_of(
    elements: Tensor, levels: Tensor, all_of_them: Tensor, lengths: Tensor, tile: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The symbol of each code under its context, how many bits it takes, and what all of a program's take."""
    most, device = elements.numel(), elements.device
    words, programs = triton.cdiv(most, EIGHT), triton.cdiv(most, _WIDTH)
    symbols, widths = (torch.empty(most, dtype=kind, device=device) for kind in (torch.int16, torch.uint8))
    turns, contexts = (torch.empty(words, dtype=torch.int64, device=device) for _ in range(2))
    sums = torch.empty(programs, dtype=torch.int64, device=device)
    each_turn, each_context = turns.view(torch.uint8), contexts.view(torch.uint8)
    launch(_classify, programs, elements, levels, all_of_them, tile, most, symbols, each_turn, WIDTH=_WIDTH)
    shape = {"LANES": _LANES, "STRETCH": STRETCH, "AHEAD": AHEAD, "warps": 1}
    launch(_follow, triton.cdiv(words, STRETCH * _LANES), turns, all_of_them, most, contexts, **shape)
    launch(_measure, programs, each_context, lengths, all_of_them, most, symbols, widths, sums, WIDTH=_WIDTH)
    return symbols, widths, sums


def _offsets(points: tuple[int, int, int]) -> list[float]:
    return [(point - 128) / 256 for point in points]


@triton.jit
def _reaching(table, values, steps, WIDTH: tl.constexpr, ALIGNED: tl.constexpr):
    """Values of a piece of a run, where they are, their step, and which are sent, as what level."""
    start, count, _, segment, _ = tile_of(table, ALIGNED)
    i = tl.arange(0, WIDTH)
    step, inverse = step_in(steps, segment, WIDTH)
    t = tl.load(values + start + i, mask=i < count, other=0.0)
    sent = (i < count) & (step > 0) & (tl.abs(t) >= step * THRESHOLD)
    level = tl.minimum(tl.maximum(tl.where(sent, tl.abs(t), 0.0) * inverse + ROUNDING, 1.0), LIMIT * 1.0)
    return t, start + i, step, sent, level.to(tl.int32)


@jitted("words", "steps", "segments", "first", "second", "others")
def _begin(words, steps, segments, first, second, others, fitting, WIDTH: tl.constexpr):
    """Writes the steps, torch's NaN for any, and the points; and that no code has room so far."""
    i = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    step = tl.load(steps + i, mask=i < segments, other=0.0)
    step = tl.where(step == step, step, float("nan")).to(tl.int32, bitcast=True)
    tl.store(words + i, tl.where(i == segments, first | (second << 8) | (others << 16), step), mask=i <= segments)
    tl.store(fitting + i, tl.zeros((WIDTH,), tl.int64), mask=i == 0)


@jitted()
def _count(table, values, steps, counts, WIDTH: tl.constexpr, ALIGNED: tl.constexpr):
    _, _, _, sent, _ = _reaching(table, values, steps, WIDTH, ALIGNED)
    tl.store(counts + tl.program_id(0), tl.sum(sent.to(tl.int32), axis=0))


@triton.jit
def _numbered(ends, sent):
    """The numbers of those that are sent, among all."""
    before = tl.load(ends + tl.program_id(0)) - tl.sum(sent.to(tl.int32), axis=0)
    return before + tl.cumsum(sent.to(tl.int32), axis=0) - 1


@jitted("most")
def _collect(
    table, values, steps, bases, ends, most, elements, levels, bits, WIDTH: tl.constexpr, ALIGNED: tl.constexpr
):
    """Leaves of each value that is sent where it is, and its level with its sign; all its bits if that is sent."""
    t, _, _, sent, level = _reaching(table, values, steps, WIDTH, ALIGNED)
    number = _numbered(ends, sent)
    mask = sent & (number < most)
    tl.store(elements + number, tl.load(bases + tl.program_id(0)) + tl.arange(0, WIDTH), mask=mask)
    tl.store(levels + number, tl.where(t < 0, level | NEGATIVE_LEVEL, level), mask=mask)
    tl.store(bits + number, t.to(tl.int32, bitcast=True), mask=mask & (level == LIMIT))


@triton.jit
def _codes(all_of_them, most, WIDTH: tl.constexpr):
    """The numbers of a program's codes, and how many there are of all that may have room."""
    return tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH), tl.minimum(tl.load(all_of_them), most)


@jitted("all_of_them", "tile", "most")
def _classify(elements, levels, all_of_them, tile, most, symbols, turns, WIDTH: tl.constexpr):
    """Of each code the symbol without its context, and what it does to those that follow; none after the end."""
    k, count = _codes(all_of_them, most, WIDTH)
    mask = k < count
    element = tl.load(elements + k, mask=mask, other=0)
    before = tl.load(elements + k - 1, mask=mask & (k > 0), other=-1)
    level = tl.load(levels + k, mask=mask, other=1) & (NEGATIVE_LEVEL - 1)
    begin = element // tile * tile
    gap_class = class_of(tl.where(mask, element - tl.maximum(before, begin - 1), 1))
    level_class = tl.where(level == LIMIT, RAW, class_of(level))
    tl.store(symbols + k, ((gap_class << LEVEL_BITS) + level_class).to(tl.int16), mask=mask)
    turn = level_class - gap_class + EVEN + tl.where(before < begin, FRESH, 0)
    turn = tl.where(mask, turn, FRESH).to(tl.uint8)
    tl.store(turns + k, turn, mask=k < (count + (_EIGHT - 1)) // _EIGHT * _EIGHT)


@jitted("all_of_them", "most")
def _follow(turns, all_of_them, most, contexts, LANES: tl.constexpr, STRETCH: tl.constexpr, AHEAD: tl.constexpr):
    """Finds the context of each code.

    How active the values before were follows from the last ones alone, nearly always: from the least and the most that
    it may have been, which never change places, it has come to the same. Where not, a lane begins earlier.
    """
    count = (tl.minimum(tl.load(all_of_them), most) + (_EIGHT - 1)) // _EIGHT
    start = (tl.program_id(0) * LANES + tl.arange(0, LANES)).to(tl.int64) * STRETCH
    least = tl.zeros((LANES,), tl.int32)
    ahead = tl.full((), AHEAD, tl.int64)
    unsettled = tl.full((), 1, tl.int32)
    while unsettled > 0:
        least = tl.full((LANES,), LEAST_ACTIVE, tl.int32)
        greatest = tl.full((LANES,), MOST_ACTIVE, tl.int32)
        for step in range(ahead):
            at = start - ahead + step
            word = tl.load(turns + at, mask=(at >= 0) & (at < count), other=-1)
            for code in tl.static_range(_EIGHT):
                turn = (word >> (8 * code)).to(tl.int32) & 255
                _, least = turned(least, turn)
                _, greatest = turned(greatest, turn)
        unsettled = tl.max(((start < count) & (least != greatest)).to(tl.int32), axis=0)
        ahead *= 2
    for step in range(STRETCH):
        mask = start + step < count
        word = tl.load(turns + start + step, mask=mask, other=-1)
        found = tl.zeros((LANES,), tl.int64)
        for code in tl.static_range(_EIGHT):
            active, least = turned(least, (word >> (8 * code)).to(tl.int32) & 255)
            found = found | (context_of(active).to(tl.int64) << (8 * code))
        tl.store(contexts + start + step, found, mask=mask)


@jitted("all_of_them", "most")
def _measure(contexts, lengths, all_of_them, most, symbols, widths, sums, WIDTH: tl.constexpr):
    """The symbol of each code under its context, how many bits it takes, and what all of them do."""
    k, count = _codes(all_of_them, most, WIDTH)
    mask = k < count
    symbol = tl.load(symbols + k, mask=mask, other=0).to(tl.int32)
    level_class = symbol & RAW
    rest = width_of(symbol >> LEVEL_BITS) + tl.where(level_class == RAW, 32, width_of(level_class) + 1)
    symbol += tl.load(contexts + k, mask=mask, other=0).to(tl.int32) * (ESCAPE + 1)
    width = tl.where(mask, tl.load(lengths + symbol, mask=mask, other=0) + rest, 0)
    tl.store(symbols + k, symbol.to(tl.uint16).to(tl.int16, bitcast=True), mask=mask)
    tl.store(widths + k, width.to(tl.uint8), mask=mask)
    tl.store(sums + tl.program_id(0), tl.sum(width, axis=0).to(tl.int64))


@triton.jit
def _put(words, at, bits, mask):
    """Sets up to 32 bits from one on."""
    shifted = (bits << (at & 31)).to(tl.uint64, bitcast=True)
    low = (shifted & tl.full((), 0xFFFFFFFF, tl.uint64)).to(tl.uint32).to(tl.int32, bitcast=True)
    high = (shifted >> 32).to(tl.uint32).to(tl.int32, bitcast=True)
    tl.atomic_or(words + (at >> 5), low, mask=mask & (low != 0), sem="relaxed")
    tl.atomic_or(words + (at >> 5) + 1, high, mask=mask & (high != 0), sem="relaxed")


@jitted("all_of_them", "room", "tile", "most", "sizes", "body")
def _write(
    elements,
    levels,
    bits,
    symbols,
    widths,
    sums,
    stops,
    all_of_them,
    lengths,
    words,
    room,
    tile,
    most,
    sizes,
    body,
    fitting,
    WIDTH: tl.constexpr,
):
    """Writes the codes that have room, and adds up how many they are; a tile takes its end less its beginning."""
    k, count = _codes(all_of_them, most, WIDTH)
    there = k < count
    width = tl.load(widths + k, mask=there, other=0).to(tl.int32)
    begun = tl.load(stops + tl.program_id(0)) - tl.load(sums + tl.program_id(0))
    stop = begun + tl.cumsum(width, axis=0).to(tl.int64)
    mask = there & (stop <= room)
    tl.atomic_add(fitting, tl.sum(mask.to(tl.int32), axis=0).to(tl.int64), sem="relaxed")
    element = tl.load(elements + k, mask=mask, other=0)
    before = tl.load(elements + k - 1, mask=mask & (k > 0), other=-1)
    number = element // tile
    begin = number * tile
    followed = mask & (k + 1 < count)
    after = tl.load(elements + k + 1, mask=followed, other=0)
    longer = stop + tl.load(widths + k + 1, mask=followed, other=0).to(tl.int64)
    last = (followed == 0) | (after >= begin + tile) | (longer > room)
    tl.atomic_add(sizes + number, stop.to(tl.int32), mask=mask & last, sem="relaxed")
    at = stop - width
    tl.atomic_add(sizes + number, (-at).to(tl.int32), mask=mask & (before < begin), sem="relaxed")
    gap = (element - tl.maximum(before, begin - 1)).to(tl.int64)
    symbol = tl.load(symbols + k, mask=mask, other=0).to(tl.int32) & 0xFFFF
    level = tl.load(levels + k, mask=mask, other=1)
    negative = (level >= NEGATIVE_LEVEL).to(tl.int64)
    level = level & (NEGATIVE_LEVEL - 1)
    code = tl.load(words + symbol, mask=mask, other=0).to(tl.int64)
    length = tl.load(lengths + symbol, mask=mask, other=0)
    gap_width = width_of((symbol % (ESCAPE + 1)) >> LEVEL_BITS)
    gap = gap & ones(gap_width)
    coarse = 2 * (level & ones(width_of(class_of(level)))) + negative
    short = width <= 32
    _put(body, at, code | (gap << length) | (coarse << (length + gap_width)), mask & short)
    if tl.max((mask & (short == 0)).to(tl.int32), axis=0) > 0:
        long = mask & (short == 0)
        exact = tl.load(bits + k, mask=long & (level == LIMIT), other=0).to(tl.int64) & 0xFFFFFFFF
        _put(body, at, code, long)
        _put(body, at + length, gap, long)
        _put(body, at + length + gap_width, tl.where(level == LIMIT, exact, coarse), long)


@jitted("first", "second", "others")
def _take(table, values, steps, ends, fitting, first, second, others, WIDTH: tl.constexpr, ALIGNED: tl.constexpr):
    """Takes from the values what was sent of them."""
    t, at, step, sent, level = _reaching(table, values, steps, WIDTH, ALIGNED)
    coarse = negated(stands_for(level, first, second, others, step), t < 0)
    left = t - tl.where(level == LIMIT, t, coarse)
    tl.store(values + at, left, mask=sent & (_numbered(ends, sent) < tl.load(fitting)))
