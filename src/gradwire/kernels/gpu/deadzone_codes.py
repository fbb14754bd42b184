"""Codes of gaps and levels, written and read.

What is sent is gathered in order first. Then only a code's context follows from those before it in its tile, so that
tiles go on side by side, a lane each; the codes themselves are written all at once. Where a code begins a reader knows
when it has read the one before, so that it reads a tile a lane.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.deferred import Flag, flag, placed
from gradwire.kernels.gpu._jitted import negated, tile_of
from gradwire.kernels.gpu._launch import jitted, launch, tiles_of
from gradwire.kernels.gpu.deadzone import step_in
from gradwire.kernels.reference import deadzone, deadzone_codes
from gradwire.kernels.reference.deadzone import HEAD, deadzone_room
from gradwire.kernels.reference.deadzone import tiles_of as number_of_tiles
from gradwire.layout import Block

LEAST_BITS = 3
"""Of a value: the shortest code, and a sign."""

SIDE_BY_SIDE = 32
"""Tiles of codes that a program goes through."""

_WIDTH = 1024
_NEGATIVE_LEVEL = tl.constexpr(1 << 30)
_AS_IT_IS = tl.constexpr(-1)
_ROUNDING = tl.constexpr(deadzone.ROUNDING)
_THRESHOLD = tl.constexpr(deadzone.THRESHOLD)
_LARGEST = tl.constexpr(deadzone.LARGEST)
_LIMIT = tl.constexpr(deadzone.LIMIT)
_MEMORY = tl.constexpr(deadzone.MEMORY)
_CONTEXTS = tl.constexpr(deadzone_codes.CONTEXTS)
_QUIETEST = tl.constexpr(deadzone_codes.QUIETEST)
_LEVEL_BITS = tl.constexpr(deadzone_codes.LEVEL_BITS)
_RAW = tl.constexpr(deadzone_codes.RAW)
_ESCAPE = tl.constexpr(deadzone_codes.ESCAPE)
_ESCAPED_BITS = tl.constexpr(deadzone_codes.ESCAPED_BITS)
_LONGEST = tl.constexpr(deadzone_codes.LONGEST)
_CODE = tl.constexpr((1 << deadzone_codes.LONGEST) - 1)
_ESCAPED = tl.constexpr((1 << deadzone_codes.ESCAPED_BITS) - 1)


@lru_cache
def _codes(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Lengths and words of symbols, and what bits say, each by context, as ``int32``."""
    lengths, words, symbols = (placed(each.astype(np.int32).ravel(), device) for each in deadzone_codes.codes())
    return lengths, words, symbols


def deadzone_encode(
    block: Block, values: Tensor, keeps: bool, steps: Tensor, points: tuple[int, int, int], tile: int, payload: Tensor
) -> Flag:
    head, device, count = 4 * block.segment_count, values.device, number_of_tiles(block, tile)
    body = payload[payload.numel() - deadzone_room(block, tile, payload) :]
    payload[head:].zero_()
    payload[:head].view(torch.float32).copy_(steps)
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
    levels, bits, symbols = torch.empty((3, most), dtype=torch.int32, device=device)
    launch(
        *(_collect, tiles.count, tiles.table, values, steps, tiles.bases, ends, most, elements, levels, bits),
        **tiles.shape,
    )
    lengths, words, _ = _codes(device)
    firsts = torch.searchsorted(elements, tile * torch.arange(count + 1, dtype=kind, device=device))
    widths = torch.zeros(most, dtype=torch.uint8, device=device)
    programs = triton.cdiv(count, SIDE_BY_SIDE)
    ahead = (_follow, programs, elements, levels, lengths, firsts, tile, count, symbols, widths)
    launch(*ahead, LANES=SIDE_BY_SIDE, warps=1)
    stops = widths.cumsum(0, dtype=torch.int64)
    written = (elements, levels, bits, symbols, widths, stops, lengths, words, room, tile, most, body.view(torch.int32))
    launch(_write, triton.cdiv(most, _WIDTH), *written, WIDTH=_WIDTH)
    fitting = torch.searchsorted(stops, room, right=True)
    sizes = torch.nn.functional.pad(stops, (1, 0))[firsts.minimum(fitting)].diff()
    payload[head + HEAD : payload.numel() - body.numel()].view(torch.int32).copy_(sizes)
    if keeps:
        launch(_take, tiles.count, tiles.table, values, steps, ends, fitting, *_offsets(points), **tiles.shape)
    return stops[-1] <= room


def deadzone_decode(block: Block, payloads: Tensor, tile: int, out: Tensor, weight: float) -> None:
    if not block.numel:
        return
    tiles, device, head = tiles_of(block, out.device), out.device, 4 * block.segment_count
    count, rows = number_of_tiles(block, tile), len(payloads)
    _, _, symbols = _codes(device)
    levels = torch.empty(block.numel, dtype=torch.int32, device=device)
    raw = torch.empty(block.numel, dtype=torch.float32, device=device)
    for row, payload in enumerate(payloads):
        words = payload.view(torch.int32)
        sizes, body = words[(head + HEAD) // 4 :][:count], words[(head + HEAD) // 4 + count :]
        stops = (sizes.long() & 0xFFFFFFFF).cumsum(0)
        levels.zero_()
        read = (stops, sizes, body, body.numel(), symbols, tile, count, block.numel, levels, raw)
        launch(_read, triton.cdiv(count, SIDE_BY_SIDE), *read, LANES=SIDE_BY_SIDE, warps=1)
        added = (tiles.table, tiles.bases, levels, raw, payload[:head].view(torch.float32), payload[head:], out)
        last = weight if row == rows - 1 else 1.0
        launch(_add, tiles.count, *added, last, FIRST=not row, **tiles.shape)


def _offsets(points: tuple[int, int, int]) -> list[float]:
    return [(point - 128) / 256 for point in points]


@triton.jit
def _class_of(number):
    """See the reference's; of numbers below 2**24, by the exponent and the highest bit of the mantissa."""
    found = (number.to(tl.float32).to(tl.int32, bitcast=True) >> 22) - 255
    return tl.maximum(found, 0)


@triton.jit
def _width_of(number):
    """How many bits say which number of a class it is."""
    return tl.maximum(((number + 1) >> 1) - 1, 0)


@triton.jit
def _first_of(number):
    """The first number of a class."""
    first = (2 + ((number + 1) & 1)).to(tl.int64) << _width_of(number).to(tl.int64)
    return tl.where(number > 0, first, 1)


@triton.jit
def _ones(width):
    """So many bits, all of them set."""
    return (tl.full(width.shape, 1, tl.int64) << width.to(tl.int64)) - 1


@triton.jit
def _context_of(activity):
    return tl.minimum(tl.maximum((activity >> 6) - _QUIETEST, 0), _CONTEXTS - 1)


@triton.jit
def _following(activity, gap_class, level_class):
    return activity + (((level_class - gap_class) * 64 - activity) >> _MEMORY)


@triton.jit
def _stands_for(level, first, second, others, step):
    """The magnitude of a level."""
    offset = tl.where(level == 1, first, tl.where(level == 2, second, others))
    magnitude = (level.to(tl.float32) + offset) * step
    return tl.where(magnitude > _LARGEST, _LARGEST, magnitude)


@triton.jit
def _reaching(table, values, steps, WIDTH: tl.constexpr, ALIGNED: tl.constexpr):
    """Values of a piece of a run, where they are, their step, and which are sent, as what level."""
    start, count, _, segment, _ = tile_of(table, ALIGNED)
    i = tl.arange(0, WIDTH)
    step, inverse = step_in(steps, segment, WIDTH)
    t = tl.load(values + start + i, mask=i < count, other=0.0)
    sent = (i < count) & (step > 0) & (tl.abs(t) >= step * _THRESHOLD)
    level = tl.minimum(tl.maximum(tl.where(sent, tl.abs(t), 0.0) * inverse + _ROUNDING, 1.0), _LIMIT * 1.0)
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


@jitted("tile", "count")
def _follow(elements, levels, lengths, firsts, tile, count, symbols, widths, LANES: tl.constexpr):
    """Finds the symbol of each value under its context, and how many bits it takes."""
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    mask = lane < count
    at = tl.load(firsts + lane, mask=mask, other=0)
    stop = tl.load(firsts + lane + 1, mask=mask, other=0)
    previous = lane.to(tl.int64) * tile - 1
    activity = tl.zeros((LANES,), tl.int32)
    for _ in range(tl.max(stop - at, axis=0)):
        live = at < stop
        element = tl.load(elements + at, mask=live, other=0).to(tl.int64)
        level = tl.load(levels + at, mask=live, other=1)
        gap_class = _class_of(tl.where(live, element - previous, 1))
        level_class = tl.where(level == _LIMIT, _RAW, _class_of(level))
        symbol = _context_of(activity) * (_ESCAPE + 1) + (gap_class << _LEVEL_BITS) + level_class
        rest = tl.where(level == _LIMIT, 32, _width_of(level_class) + 1)
        width = tl.load(lengths + symbol, mask=live, other=0) + _width_of(gap_class) + rest
        tl.store(symbols + at, symbol, mask=live)
        tl.store(widths + at, width.to(tl.uint8), mask=live)
        activity = _following(activity, gap_class, level_class)
        previous = element
        at += 1


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
    gap_width = _width_of((symbol % (_ESCAPE + 1)) >> _LEVEL_BITS)
    _put(body, at, gap & _ones(gap_width), mask)
    at += gap_width
    coarse = 2 * (level & _ones(_width_of(_class_of(level)))) + (value < 0).to(tl.int64)
    exact = value.to(tl.int64) & 0xFFFFFFFF
    _put(body, at, tl.where(level == _LIMIT, exact, coarse), mask)


@jitted("first", "second", "others")
def _take(table, values, steps, ends, fitting, first, second, others, WIDTH: tl.constexpr, ALIGNED: tl.constexpr):
    """Takes from the values what was sent of them."""
    t, at, step, sent, level = _reaching(table, values, steps, WIDTH, ALIGNED)
    coarse = negated(_stands_for(level, first, second, others, step), t < 0)
    left = t - tl.where(level == _LIMIT, t, coarse)
    tl.store(values + at, left, mask=sent & (_numbered(ends, sent) < tl.load(fitting)))


@triton.jit
def _bits_from(words, count, at, live):
    """The next 33 bits and some more; zeros beyond the end."""
    word = at >> 5
    low = tl.load(words + word, mask=live & (word < count), other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(words + word + 1, mask=live & (word + 1 < count), other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
    return ((high << 32) | low) >> (at & 31).to(tl.uint64)


@jitted("sizes", "words", "count_of_words", "tile", "count", "numel")
def _read(stops, sizes, words, count_of_words, symbols, tile, count, numel, levels, raw, LANES: tl.constexpr):
    """Leaves the level of each value that is sent, with its sign, or that it is sent as it is."""
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    mask = lane < count
    stop = tl.load(stops + lane, mask=mask, other=0)
    at = stop - (tl.load(sizes + lane, mask=mask, other=0).to(tl.int64) & 0xFFFFFFFF)
    first = lane.to(tl.int64) * tile
    end = tl.minimum(first + tile, numel)
    place = first - 1
    activity = tl.zeros((LANES,), tl.int32)
    live = mask & (at < stop)
    while tl.max(live.to(tl.int32), axis=0) > 0:
        window = _bits_from(words, count_of_words, at, live).to(tl.int64, bitcast=True)
        entry = tl.load(symbols + (_context_of(activity) << _LONGEST) + (window & _CODE))
        width = (entry >> _LONGEST).to(tl.int64)
        symbol = entry & _CODE
        escaped = symbol == _ESCAPE
        symbol = tl.where(escaped, ((window >> width) & _ESCAPED).to(tl.int32), symbol)
        at += width + tl.where(escaped, _ESCAPED_BITS, 0)
        gap_class = symbol >> _LEVEL_BITS
        level_class = symbol & _RAW
        activity = _following(activity, gap_class, level_class)
        window = _bits_from(words, count_of_words, at, live).to(tl.int64, bitcast=True)
        place += _first_of(gap_class) + (window & _ones(_width_of(gap_class)))
        at += _width_of(gap_class)
        window = _bits_from(words, count_of_words, at, live).to(tl.int64, bitcast=True)
        width = _width_of(level_class).to(tl.int64)
        level = (_first_of(level_class) + ((window >> 1) & _ones(width))).to(tl.int32)
        level = tl.where((window & 1) != 0, level | _NEGATIVE_LEVEL, level)
        live = live & (place < end)
        as_it_is = level_class == _RAW
        value = (window & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)
        tl.store(levels + place, tl.where(as_it_is, _AS_IT_IS, level), mask=live)
        tl.store(raw + place, value, mask=live & as_it_is)
        at += tl.where(as_it_is, 32, width + 1)
        live = live & (at < stop)


@jitted("steps", "points", "weight")
def _add(
    table,
    bases,
    levels,
    raw,
    steps,
    points,
    out,
    weight,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    start, count, _, segment, _ = tile_of(table, ALIGNED)
    i = tl.arange(0, WIDTH)
    mask = i < count
    base = tl.load(bases + tl.program_id(0))
    word = tl.load(levels + base + i, mask=mask, other=0)
    step = tl.broadcast_to(tl.load(steps + segment + tl.arange(0, 1)), (WIDTH,))
    first = (tl.load(points).to(tl.float32) - 128) * 0.00390625
    second = (tl.load(points + 1).to(tl.float32) - 128) * 0.00390625
    others = (tl.load(points + 2).to(tl.float32) - 128) * 0.00390625
    level = word & (_NEGATIVE_LEVEL - 1)
    coarse = negated(_stands_for(level, first, second, others, step), (word & _NEGATIVE_LEVEL) != 0)
    as_it_is = word == _AS_IT_IS
    value = tl.load(raw + base + i, mask=mask & as_it_is, other=coarse)
    value = tl.where(step == step, tl.where(word == 0, 0.0, value), float("nan"))
    total = tl.zeros((WIDTH,), tl.float32)
    if not FIRST:
        total = tl.load(out + start + i, mask=mask, other=0.0)
    tl.store(out + start + i, (total + value) * weight, mask=mask)
