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
    LEAST_ACTIVE,
    LEVEL_BITS,
    LIMIT,
    MOST_ACTIVE,
    RAW,
    ROUNDING,
    SIDE_BY_SIDE,
    THRESHOLD,
    class_of,
    code_tables,
    context_of,
    following,
    ones,
    stands_for,
    width_of,
)
from gradwire.kernels.gpu._jitted import negated, tile_of
from gradwire.kernels.gpu._launch import jitted, launch, tiles_of
from gradwire.kernels.gpu.deadzone import step_in
from gradwire.kernels.reference.deadzone import HEAD, deadzone_room
from gradwire.kernels.reference.deadzone import tiles_of as number_of_tiles
from gradwire.layout import Block

LEAST_BITS = 3
"""Of a value: the shortest code, and a sign."""

STRETCH = 64
"""Codes whose symbols a lane finds."""

AHEAD = 128
"""Codes before them that it looks at first, to know how active they were."""

_WIDTH = 1024


def deadzone_encode(
    block: Block, values: Tensor, keeps: bool, steps: Tensor, points: tuple[int, int, int], tile: int, payload: Tensor
) -> Flag:
    head, device, count = 4 * block.segment_count, values.device, number_of_tiles(block, tile)
    body = payload[payload.numel() - deadzone_room(block, tile, payload) :]
    payload[head:].zero_()
    payload[:head].view(torch.float32).copy_(steps.masked_fill(steps.isnan(), torch.nan))
    for number, point in enumerate(points):
        payload[head + number].fill_(point)
    if not block.numel:
        return flag(True)
    tiles, room = tiles_of(block, device), 8 * body.numel()
    counts = torch.empty(tiles.count, dtype=torch.int64, device=device)
    launch(_count, tiles.count, tiles.table, values, steps, counts, **tiles.shape)
    ends, most = counts.cumsum(0), min(block.numel, room // LEAST_BITS + 1)
    kind = torch.int32 if block.numel + tile < 2**31 else torch.int64
    elements = torch.full((most,), torch.iinfo(kind).max, dtype=kind, device=device)
    levels, bits, symbols = (torch.empty(most, dtype=torch.int32, device=device) for _ in range(3))
    launch(
        *(_collect, tiles.count, tiles.table, values, steps, tiles.bases, ends, most, elements, levels, bits),
        **tiles.shape,
    )
    lengths, words, _ = code_tables(device)
    firsts = torch.searchsorted(elements, tile * torch.arange(count + 1, dtype=kind, device=device))
    widths = torch.zeros(most, dtype=torch.uint8, device=device)
    ahead = (elements, levels, lengths, tile, block.numel, most, symbols, widths)
    programs = triton.cdiv(most, STRETCH * SIDE_BY_SIDE)
    launch(_follow, programs, *ahead, LANES=SIDE_BY_SIDE, STRETCH=STRETCH, AHEAD=AHEAD, warps=1)
    stops = widths.cumsum(0, dtype=torch.int64)
    written = (elements, levels, bits, symbols, widths, stops, lengths, words, room, tile, most, body.view(torch.int32))
    launch(_write, triton.cdiv(most, _WIDTH), *written, WIDTH=_WIDTH)
    fitting = torch.searchsorted(stops, room, right=True)
    sizes = torch.nn.functional.pad(stops, (1, 0))[firsts.minimum(fitting)].diff()
    payload[head + HEAD : payload.numel() - body.numel()].view(torch.int32).copy_(sizes)
    if keeps:
        launch(_take, tiles.count, tiles.table, values, steps, ends, fitting, *_offsets(points), **tiles.shape)
    return stops[-1] <= room


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


@jitted()
def _count(table, values, steps, counts, WIDTH: tl.constexpr, ALIGNED: tl.constexpr):
    _, _, _, sent, _ = _reaching(table, values, steps, WIDTH, ALIGNED)
    tl.store(counts + tl.program_id(0), tl.sum(sent.to(tl.int64), axis=0))


@triton.jit
def _numbered(ends, sent):
    """The numbers of those that are sent, among all."""
    before = tl.load(ends + tl.program_id(0)) - tl.sum(sent.to(tl.int64), axis=0)
    return before + tl.cumsum(sent.to(tl.int64), axis=0) - 1


@jitted("most")
def _collect(
    table, values, steps, bases, ends, most, elements, levels, bits, WIDTH: tl.constexpr, ALIGNED: tl.constexpr
):
    t, _, _, sent, level = _reaching(table, values, steps, WIDTH, ALIGNED)
    number = _numbered(ends, sent)
    mask = sent & (number < most)
    tl.store(elements + number, tl.load(bases + tl.program_id(0)) + tl.arange(0, WIDTH), mask=mask)
    tl.store(levels + number, level, mask=mask)
    tl.store(bits + number, t.to(tl.int32, bitcast=True), mask=mask)


@triton.jit
def _classes(elements, levels, at, previous, live, tile):
    """Of a code: its element, the classes of gap and level, the level, and whether it is the first of its tile."""
    element = tl.load(elements + at, mask=live, other=0).to(tl.int64)
    level = tl.load(levels + at, mask=live, other=1)
    begin = element // tile * tile
    fresh = previous < begin
    gap_class = class_of(tl.where(live, element - tl.maximum(previous, begin - 1), 1))
    return element, gap_class, tl.where(level == LIMIT, RAW, class_of(level)), level, fresh


@jitted("tile", "numel", "most")
def _follow(
    elements,
    levels,
    lengths,
    tile,
    numel,
    most,
    symbols,
    widths,
    LANES: tl.constexpr,
    STRETCH: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Finds the symbol of each value under its context, and how many bits it takes.

    How active the values before were follows from the last ones alone, nearly always: from the least and the most that
    it may have been, which never change places, it has come to the same. Where not, a lane begins earlier.
    """
    start = (tl.program_id(0) * LANES + tl.arange(0, LANES)).to(tl.int64) * STRETCH
    needed = tl.load(elements + start, mask=start < most, other=numel).to(tl.int64) < numel
    least = tl.zeros((LANES,), tl.int32)
    previous = tl.full((LANES,), -1, tl.int64)
    ahead = tl.full((), AHEAD, tl.int64)
    unsettled = tl.full((), 1, tl.int32)
    while unsettled > 0:
        first = tl.maximum(start - ahead, 0)
        least = tl.full((LANES,), LEAST_ACTIVE, tl.int32)
        greatest = tl.full((LANES,), MOST_ACTIVE, tl.int32)
        previous = tl.load(elements + first - 1, mask=needed & (first > 0), other=-1).to(tl.int64)
        for step in range(ahead):
            at = first + step
            live = needed & (at < start)
            element, gap_class, level_class, _, fresh = _classes(elements, levels, at, previous, live, tile)
            least = tl.where(live & fresh, 0, least)
            greatest = tl.where(live & fresh, 0, greatest)
            least = tl.where(live, following(least, gap_class, level_class), least)
            greatest = tl.where(live, following(greatest, gap_class, level_class), greatest)
            previous = tl.where(live, element, previous)
        unsettled = tl.max((needed & (least != greatest) & (first > 0)).to(tl.int32), axis=0)
        ahead *= 2
    for step in range(STRETCH):
        at = start + step
        live = needed & (at < most)
        element, gap_class, level_class, level, fresh = _classes(elements, levels, at, previous, live, tile)
        live = live & (element < numel)
        least = tl.where(fresh, 0, least)
        symbol = context_of(least) * (ESCAPE + 1) + (gap_class << LEVEL_BITS) + level_class
        rest = tl.where(level == LIMIT, 32, width_of(level_class) + 1)
        width = tl.load(lengths + symbol, mask=live, other=0) + width_of(gap_class) + rest
        tl.store(symbols + at, symbol, mask=live)
        tl.store(widths + at, width.to(tl.uint8), mask=live)
        least = following(least, gap_class, level_class)
        previous = element


@triton.jit
def _put(words, at, bits, mask):
    """Sets up to 32 bits from one on."""
    shifted = (bits << (at & 31)).to(tl.uint64, bitcast=True)
    low = (shifted & tl.full((), 0xFFFFFFFF, tl.uint64)).to(tl.uint32).to(tl.int32, bitcast=True)
    high = (shifted >> 32).to(tl.uint32).to(tl.int32, bitcast=True)
    tl.atomic_or(words + (at >> 5), low, mask=mask & (low != 0), sem="relaxed")
    tl.atomic_or(words + (at >> 5) + 1, high, mask=mask & (high != 0), sem="relaxed")


@jitted("room", "tile", "most", "body")
def _write(elements, levels, bits, symbols, widths, stops, lengths, words, room, tile, most, body, WIDTH: tl.constexpr):
    k = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    width = tl.load(widths + k, mask=k < most, other=0).to(tl.int64)
    stop = tl.load(stops + k, mask=k < most, other=0)
    mask = (width > 0) & (stop <= room)
    element = tl.load(elements + k, mask=mask, other=0).to(tl.int64)
    before = tl.load(elements + k - 1, mask=mask & (k > 0), other=-1).to(tl.int64)
    gap = element - tl.maximum(before, element // tile * tile - 1)
    symbol = tl.load(symbols + k, mask=mask, other=0)
    level = tl.load(levels + k, mask=mask, other=1)
    value = tl.load(bits + k, mask=mask, other=0)
    at = stop - width
    _put(body, at, tl.load(words + symbol, mask=mask, other=0).to(tl.int64), mask)
    at += tl.load(lengths + symbol, mask=mask, other=0)
    gap_width = width_of((symbol % (ESCAPE + 1)) >> LEVEL_BITS)
    _put(body, at, gap & ones(gap_width), mask)
    at += gap_width
    coarse = 2 * (level & ones(width_of(class_of(level)))) + (value < 0).to(tl.int64)
    exact = value.to(tl.int64) & 0xFFFFFFFF
    _put(body, at, tl.where(level == LIMIT, exact, coarse), mask)


@jitted("first", "second", "others")
def _take(table, values, steps, ends, fitting, first, second, others, WIDTH: tl.constexpr, ALIGNED: tl.constexpr):
    """Takes from the values what was sent of them."""
    t, at, step, sent, level = _reaching(table, values, steps, WIDTH, ALIGNED)
    coarse = negated(stands_for(level, first, second, others, step), t < 0)
    left = t - tl.where(level == LIMIT, t, coarse)
    tl.store(values + at, left, mask=sent & (_numbered(ends, sent) < tl.load(fitting)))
