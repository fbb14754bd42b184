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
"""Tiles, or stretches of codes, that a program goes through, a lane each."""

STRETCH = 64
"""Codes whose symbols a lane finds."""

ROOM = 2**29
"""Bytes that levels take while they are read: of so many rows at once as it holds, and of one at least."""

TURNS = 8
"""Codes that a lane reads before the program looks whether any is left."""

AHEAD = 128
"""Codes before them that it looks at first, to know how active they were."""

_WIDTH = 1024
_NEGATIVE_LEVEL = tl.constexpr(1 << 30)
_AS_IT_IS = tl.constexpr(-1)
_ROUNDING = tl.constexpr(deadzone.ROUNDING)
_THRESHOLD = tl.constexpr(deadzone.THRESHOLD)
_LARGEST = tl.constexpr(deadzone.LARGEST)
_LIMIT = tl.constexpr(deadzone.LIMIT)
_MEMORY = tl.constexpr(deadzone.MEMORY)
_LEAST_ACTIVE = tl.constexpr(-64 * 64)
_MOST_ACTIVE = tl.constexpr(64 * deadzone_codes.LEVEL_CLASSES)
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
    levels, bits, symbols = torch.empty((3, most), dtype=torch.int32, device=device)
    launch(
        *(_collect, tiles.count, tiles.table, values, steps, tiles.bases, ends, most, elements, levels, bits),
        **tiles.shape,
    )
    lengths, words, _ = _codes(device)
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


def deadzone_decode(block: Block, payloads: Tensor, tile: int, out: Tensor, weight: float) -> None:
    if not block.numel:
        return
    tiles, device, head = tiles_of(block, out.device), out.device, 4 * block.segment_count
    count, rows = number_of_tiles(block, tile), len(payloads)
    programs, at_once = triton.cdiv(count, SIDE_BY_SIDE), max(min(rows, ROOM // (8 * block.numel)), 1)
    _, _, symbols = _codes(device)
    levels = torch.empty(at_once, block.numel, dtype=torch.int32, device=device)
    raw = torch.empty(at_once, block.numel, dtype=torch.float32, device=device)
    for first in range(0, rows, at_once):
        words = payloads[first : first + at_once].view(torch.int32)
        sizes = words[:, (head + HEAD) // 4 :][:, :count].long() & 0xFFFFFFFF
        body = words[:, (head + HEAD) // 4 + count :]
        levels.zero_()
        read = (sizes.cumsum(1), sizes, body, body.shape[1], body.stride(0), symbols, tile, count, block.numel)
        launch(_read, len(words) * programs, *read, programs, levels, raw, LANES=SIDE_BY_SIDE, TURNS=TURNS, warps=1)
        steps, points = words.view(torch.float32), payloads[first:, head:]
        added = (tiles.table, tiles.bases, levels, raw, block.numel, steps, words.stride(0), points, out)
        last = weight if first + len(words) == rows else 1.0
        launch(_add, tiles.count, *added, len(words), last, FIRST=not first, **tiles.shape)


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


@triton.jit
def _classes(elements, levels, at, previous, live, tile):
    """Of a code: its element, the classes of gap and level, the level, and whether it is the first of its tile."""
    element = tl.load(elements + at, mask=live, other=0).to(tl.int64)
    level = tl.load(levels + at, mask=live, other=1)
    begin = element // tile * tile
    fresh = previous < begin
    gap_class = _class_of(tl.where(live, element - tl.maximum(previous, begin - 1), 1))
    return element, gap_class, tl.where(level == _LIMIT, _RAW, _class_of(level)), level, fresh


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
        least = tl.full((LANES,), _LEAST_ACTIVE, tl.int32)
        greatest = tl.full((LANES,), _MOST_ACTIVE, tl.int32)
        previous = tl.load(elements + first - 1, mask=needed & (first > 0), other=-1).to(tl.int64)
        for step in range(ahead):
            at = first + step
            live = needed & (at < start)
            element, gap_class, level_class, _, fresh = _classes(elements, levels, at, previous, live, tile)
            least = tl.where(live & fresh, 0, least)
            greatest = tl.where(live & fresh, 0, greatest)
            least = tl.where(live, _following(least, gap_class, level_class), least)
            greatest = tl.where(live, _following(greatest, gap_class, level_class), greatest)
            previous = tl.where(live, element, previous)
        unsettled = tl.max((needed & (least != greatest) & (first > 0)).to(tl.int32), axis=0)
        ahead *= 2
    for step in range(STRETCH):
        at = start + step
        live = needed & (at < most)
        element, gap_class, level_class, level, fresh = _classes(elements, levels, at, previous, live, tile)
        live = live & (element < numel)
        least = tl.where(fresh, 0, least)
        symbol = _context_of(least) * (_ESCAPE + 1) + (gap_class << _LEVEL_BITS) + level_class
        rest = tl.where(level == _LIMIT, 32, _width_of(level_class) + 1)
        width = tl.load(lengths + symbol, mask=live, other=0) + _width_of(gap_class) + rest
        tl.store(symbols + at, symbol, mask=live)
        tl.store(widths + at, width.to(tl.uint8), mask=live)
        least = _following(least, gap_class, level_class)
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
def _from(low, high, width):
    """32 bits of 64, from one of the lower half on."""
    return (low >> width.to(tl.uint32)) | ((high << 1) << (31 - width).to(tl.uint32))


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

    A code, what it says of the gap and of the level are 86 bits at most, which are read at once: where the next code
    begins is known when its symbol is.
    """
    row = (tl.program_id(0) // programs).to(tl.int64)
    lane = (tl.program_id(0) % programs) * LANES + tl.arange(0, LANES)
    mask = lane < count
    words += row * stride
    levels += row * numel
    raw += row * numel
    size = tl.load(sizes + row * count + lane, mask=mask, other=0)
    begin = tl.load(stops + row * count + lane, mask=mask, other=0) - size
    word = begin >> 5
    shift = (begin & 31).to(tl.int32)
    first = lane.to(tl.int64) * tile
    end = tl.minimum(first + tile, numel)
    place = first - 1
    activity = tl.zeros((LANES,), tl.int32)
    live = mask & (size > 0)
    while tl.max(live.to(tl.int32), axis=0) > 0:
        for _ in range(TURNS):
            w0 = tl.load(words + word, mask=live & (word < count_of_words), other=0).to(tl.uint32, bitcast=True)
            w1 = tl.load(words + word + 1, mask=live & (word + 1 < count_of_words), other=0).to(tl.uint32, bitcast=True)
            w2 = tl.load(words + word + 2, mask=live & (word + 2 < count_of_words), other=0).to(tl.uint32, bitcast=True)
            w3 = tl.load(words + word + 3, mask=live & (word + 3 < count_of_words), other=0).to(tl.uint32, bitcast=True)
            w0 = _from(w0, w1, shift)
            w1 = _from(w1, w2, shift)
            w2 = _from(w2, w3, shift)
            entry = tl.load(symbols + (_context_of(activity) << _LONGEST) + (w0 & _CODE).to(tl.int32))
            width = entry >> _LONGEST
            symbol = entry & _CODE
            escaped = symbol == _ESCAPE
            symbol = tl.where(escaped, ((w0 >> width.to(tl.uint32)) & _ESCAPED).to(tl.int32), symbol)
            width += tl.where(escaped, _ESCAPED_BITS, 0)
            gap_class = symbol >> _LEVEL_BITS
            level_class = symbol & _RAW
            activity = _following(activity, gap_class, level_class)
            as_it_is = level_class == _RAW
            gap_width = _width_of(gap_class)
            level_width = _width_of(level_class)
            taken = width + gap_width + tl.where(as_it_is, 32, level_width + 1)
            w0 = _from(w0, w1, width)
            w1 = _from(w1, w2, width)
            place += _first_of(gap_class) + (w0.to(tl.int64) & _ones(gap_width))
            w0 = _from(w0, w1, gap_width)
            level = (_first_of(level_class) + ((w0 >> 1).to(tl.int64) & _ones(level_width))).to(tl.int32)
            level = tl.where((w0 & 1) != 0, level | _NEGATIVE_LEVEL, level)
            live = live & (place < end)
            tl.store(levels + place, tl.where(as_it_is, _AS_IT_IS, level), mask=live)
            tl.store(raw + place, w0.to(tl.float32, bitcast=True), mask=live & as_it_is)
            size -= taken
            shift += taken
            word += shift >> 5
            shift = shift & 31
            live = live & (size > 0)


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
        level = word & (_NEGATIVE_LEVEL - 1)
        coarse = negated(_stands_for(level, first, second, others, step), (word & _NEGATIVE_LEVEL) != 0)
        as_it_is = word == _AS_IT_IS
        value = tl.where(as_it_is, tl.load(raw + at, mask=mask & as_it_is, other=0.0), coarse)
        value = tl.where(step == step, tl.where(word == 0, 0.0, value), float("nan"))
        total += value
    tl.store(out + start + i, total * weight, mask=mask)
