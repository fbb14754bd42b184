"""Reads codes of gaps and levels.

Where a code begins is known when the one before was read, so that a single reader waits half of its time. Two read side
by side, each a tile of its own, one code of each in turn. They add up all payloads of their tile, one after the other,
and take the next tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from gradwire.kernels.cpu._compiled import Float32Array, UInt8Array, array, compiled, inlined, rows_of_bytes
from gradwire.kernels.cpu._instructions import load64
from gradwire.kernels.cpu._levels import context_of, following, offsets_of, point_of, signed
from gradwire.kernels.parts import Part, of_tiles, side_by_side
from gradwire.kernels.reference.deadzone import HEAD, LARGEST, first_of, tiles_of
from gradwire.kernels.reference.deadzone_codes import (
    ESCAPE,
    ESCAPED_BITS,
    LEVEL_BITS,
    LEVEL_CLASSES,
    LONGEST,
    RAW,
    codes,
)
from gradwire.layout import Block, Int64Array

UInt16Array = np.ndarray[Any, np.dtype[np.uint16]]

READERS = 2

WINDOW = 57
"""Bits that there are in eight bytes from any bit of the first one on."""

OVER = 1 << 62
"""Where the next code is in a tile that has no more elements."""

AT, QUICK, STOP, ACTIVITY, PLACE, BOUND, SEGMENT, ROW, TILE, FIRST, NUMEL = range(11)
"""What a reader knows: its next bit, the first one that has no eight bytes, and where the codes end; the activity; in
the tile the place of the value before, and where its segment ends; that segment, and the payload; the tile, its first
element, and how many it has, none if all tiles are taken."""

_FIRSTS, _WIDTHS = np.array([first_of(number) for number in range(64)], np.int64).T.copy()
"""The first number of each class, and the bits that follow."""

_RESTS = np.full(ESCAPE + 1, WINDOW, np.uint8)
"""Bits after the code of each symbol; as many as there may be of those that are not read at once."""
for _symbol in range(ESCAPE):
    if _symbol & RAW != RAW:
        _RESTS[_symbol] = _WIDTHS[_symbol >> LEVEL_BITS] + 1 + _WIDTHS[_symbol & RAW]


class _Layout(NamedTuple):
    """Where elements are, numbered through all segments."""

    runs: Int64Array
    run_ends: Int64Array
    segment_ends: Int64Array
    tile: int


class _Payloads(NamedTuple):
    """``packed`` is all of their bytes; ``starts`` and ``limits`` are bits of it, of each tile and where rows end."""

    packed: UInt8Array
    starts: Int64Array
    limits: Int64Array
    steps: Float32Array
    offsets: Float32Array


class _Codes(NamedTuple):
    symbols: UInt16Array
    rests: UInt8Array
    firsts: Int64Array
    widths: Int64Array


class _Readers(NamedTuple):
    """A row each: what is known, offsets of levels and the step, the sum; and the next tile of all."""

    known: Int64Array
    points: Float32Array
    sums: Float32Array
    ahead: Int64Array


def deadzone_decode(block: Block, payloads: Tensor, tile: int, out: Tensor, weight: float) -> None:
    packed, stride = rows_of_bytes(payloads)
    rows, (count, size) = array(payloads), payloads.shape
    head, tiles = 4 * block.segment_count, tiles_of(block, tile)
    edge, begins = head + HEAD + 4 * tiles, 8 * stride * np.arange(count)
    starts = np.zeros((count, tiles + 1), np.int64)
    np.cumsum(rows[:, head + HEAD : edge].view(np.uint32), 1, np.int64, starts[:, 1:])
    steps, offsets = np.ascontiguousarray(rows[:, :head]).view(np.float32), offsets_of(rows[:, head : head + 3])
    starts += begins[:, None] + 8 * edge
    book, target = _Codes(codes().symbols.reshape(-1), _RESTS, _FIRSTS, _WIDTHS), array(out)

    def decode(part: Part) -> None:
        own, first, last = part.block, part.element // tile, part.segment + part.block.segment_count
        _decode(
            _Layout(own.runs, np.cumsum(own.runs[:, 1]), np.cumsum(own.segment_numels), tile),
            _Payloads(
                packed,
                np.ascontiguousarray(starts[:, first : first + tiles_of(own, tile) + 1]),
                begins + 8 * size,
                np.ascontiguousarray(steps[:, part.segment : last]),
                offsets,
            ),
            book,
            _Readers(
                np.zeros((READERS, 11), np.int64),
                np.zeros((READERS, 4), np.float32),
                np.empty((READERS, min(tile, own.numel)), np.float32),
                np.zeros(1, np.int64),
            ),
            target,
            np.float32(weight),
        )

    side_by_side(decode, of_tiles(block, tile))


@compiled
def _decode(
    layout: _Layout, payloads: _Payloads, codes: _Codes, readers: _Readers, out: Float32Array, weight: np.float32
) -> None:
    known = readers.known
    for reader in range(READERS):
        _take(layout, payloads, readers, reader)
    together = True
    while together:
        for reader in range(READERS):
            while known[reader, NUMEL] > 0 and known[reader, AT] >= known[reader, QUICK]:
                _go_on(layout, payloads, codes, readers, reader, out, weight)
            together &= known[reader, NUMEL] > 0
        reading = together
        while reading:
            for reader in range(READERS):
                reading &= _read(layout, payloads, codes, readers, reader)
    for reader in range(READERS):
        while known[reader, NUMEL] > 0:
            _go_on(layout, payloads, codes, readers, reader, out, weight)


@compiled
def _take(layout: _Layout, payloads: _Payloads, readers: _Readers, reader: int) -> None:
    """Begins the next tile, if there is one."""
    known, total = readers.known[reader], layout.segment_ends[-1] if layout.segment_ends.size else 0
    known[TILE] = readers.ahead[0]
    readers.ahead[0] += 1
    known[FIRST] = known[TILE] * layout.tile
    known[NUMEL] = max(min(layout.tile, total - known[FIRST]), 0)
    if known[NUMEL] > 0:
        t = readers.sums[reader, : known[NUMEL]]
        t[:] = 0
        place, segment = np.int64(0), np.searchsorted(layout.segment_ends, known[FIRST], side="right")
        while place < known[NUMEL]:
            end = min(layout.segment_ends[segment] - known[FIRST], known[NUMEL])
            for row in range(len(payloads.steps)):
                if payloads.steps[row, segment] != payloads.steps[row, segment]:
                    t[place:end] = np.nan
            place, segment = end, segment + 1
        known[ROW] = 0
        _begin(layout, payloads, readers, reader)


@compiled
def _begin(layout: _Layout, payloads: _Payloads, readers: _Readers, reader: int) -> None:
    """Goes to the tile's codes in a payload."""
    known, points = readers.known[reader], readers.points[reader]
    row, segment = known[ROW], np.searchsorted(layout.segment_ends, known[FIRST], side="right")
    known[AT], known[STOP] = payloads.starts[row, known[TILE]], payloads.starts[row, known[TILE] + 1]
    known[QUICK] = min(known[STOP], payloads.limits[row] - 63)
    known[ACTIVITY], known[PLACE], known[SEGMENT] = 0, -1, segment
    known[BOUND] = min(layout.segment_ends[segment] - known[FIRST], known[NUMEL])
    for i in range(3):
        points[i] = payloads.offsets[row, i]
    points[3] = payloads.steps[row, segment]


@compiled
def _go_on(
    layout: _Layout,
    payloads: _Payloads,
    codes: _Codes,
    readers: _Readers,
    reader: int,
    out: Float32Array,
    weight: np.float32,
) -> None:
    """Reads what is left of a tile in a payload, and begins the next payload, or writes the sum and begins a tile."""
    known = readers.known[reader]
    while known[AT] < known[QUICK]:
        _read(layout, payloads, codes, readers, reader)
    while known[AT] < known[STOP]:
        _read_slowly(layout, payloads, codes, readers, reader)
    known[ROW] += 1
    if known[ROW] < len(payloads.steps):
        _begin(layout, payloads, readers, reader)
        return
    place, run = np.int64(0), np.searchsorted(layout.run_ends, known[FIRST], side="right")
    while place < known[NUMEL]:
        end = min(layout.run_ends[run] - known[FIRST], known[NUMEL])
        start = layout.runs[run, 0] + layout.runs[run, 1] - layout.run_ends[run] + known[FIRST] + place
        target, t = out[start : start + end - place], readers.sums[reader, place:end]
        for i in range(t.size):
            target[i] = t[i] * weight
        place, run = end, run + 1
    _take(layout, payloads, readers, reader)


@inlined
def _read(layout: _Layout, payloads: _Payloads, codes: _Codes, readers: _Readers, reader: int) -> bool:
    """Adds the next value, eight bytes being there; returns whether they are for the one after it."""
    known = readers.known[reader]
    at, activity = known[AT], known[ACTIVITY]
    window = load64(payloads.packed, at >> 3) >> np.uint64(at & 7)
    entry = _entry(codes, activity, window)
    width, symbol = entry >> LONGEST, entry & ((1 << LONGEST) - 1)
    after = width + codes.rests[np.uint64(symbol)]
    if after > WINDOW:
        _read_slowly(layout, payloads, codes, readers, reader)
    else:
        gap_class, level_class = np.uint64(symbol >> LEVEL_BITS), np.uint64(symbol & (LEVEL_CLASSES - 1))
        window >>= np.uint64(width)
        gap_width = codes.widths[gap_class]
        place = known[PLACE] + codes.firsts[gap_class] + _low(window, gap_width)
        window >>= np.uint64(gap_width)
        level = codes.firsts[level_class] + _low(window >> np.uint64(1), codes.widths[level_class])
        known[AT], known[PLACE] = at + after, place
        known[ACTIVITY] = following(activity, np.int64(gap_class), np.int64(level_class))
        if place < known[BOUND] or _is_inside(layout, payloads, readers, reader):
            points = readers.points[reader]
            magnitude = (np.float32(level) + points[point_of(np.int64(level_class))]) * points[3]
            magnitude = np.float32(LARGEST) if magnitude > np.float32(LARGEST) else magnitude
            readers.sums[reader, np.uint64(place)] += signed(magnitude, window & np.uint64(1))
    return bool(known[AT] < known[QUICK])


@compiled
def _is_inside(layout: _Layout, payloads: _Payloads, readers: _Readers, reader: int) -> bool:
    """Whether a place is in the tile; goes on to its segment, or ends the tile."""
    known = readers.known[reader]
    if known[PLACE] >= known[NUMEL]:
        known[AT] = OVER
        return False
    while known[PLACE] >= known[BOUND]:
        known[SEGMENT] += 1
        known[BOUND] = min(layout.segment_ends[known[SEGMENT]] - known[FIRST], known[NUMEL])
    readers.points[reader, 3] = payloads.steps[known[ROW], known[SEGMENT]]
    return True


@compiled
def _read_slowly(layout: _Layout, payloads: _Payloads, codes: _Codes, readers: _Readers, reader: int) -> None:
    """The same for any symbol, where a payload ends, too."""
    known, points = readers.known[reader], readers.points[reader]
    limit, at = payloads.limits[known[ROW]], known[AT]
    window = _window(payloads.packed, limit, at)
    entry = _entry(codes, known[ACTIVITY], window)
    width, symbol = entry >> LONGEST, entry & ((1 << LONGEST) - 1)
    if symbol == ESCAPE:
        symbol, width = _low(window >> np.uint64(width), np.int64(ESCAPED_BITS)), width + ESCAPED_BITS
    gap_class, level_class = symbol >> LEVEL_BITS, symbol & (LEVEL_CLASSES - 1)
    known[ACTIVITY] = following(known[ACTIVITY], gap_class, level_class)
    at += width
    gap_width, level_width = codes.widths[gap_class], codes.widths[level_class]
    known[PLACE] += codes.firsts[gap_class] + _low(_window(payloads.packed, limit, at), gap_width)
    at += gap_width
    window = _window(payloads.packed, limit, at)
    known[AT] = at + (32 if level_class == RAW else 1 + level_width)
    if known[PLACE] < known[BOUND] or _is_inside(layout, payloads, readers, reader):
        level = codes.firsts[level_class] + _low(window >> np.uint64(1), level_width)
        value = (np.float32(level) + points[min(level, 3) - 1]) * points[3]
        value = np.float32(LARGEST) if value > np.float32(LARGEST) else value
        value = -value if window & np.uint64(1) else value
        raw = np.uint32(window & np.uint64(0xFFFFFFFF)).view(np.float32)
        readers.sums[reader, known[PLACE]] += raw if level_class == RAW else value


@inlined
def _window(packed: UInt8Array, limit: np.int64, at: np.int64) -> np.uint64:
    """At least :data:`WINDOW` bits from one on; zeros beyond the payload."""
    first, end = at >> 3, limit >> 3
    bits = np.uint64(0)
    if first + 8 <= end:
        bits = load64(packed, first)
    else:
        for i in range(end - first):
            bits |= np.uint64(packed[first + i]) << np.uint64(8 * i)
    return bits >> np.uint64(at & 7)


@inlined
def _entry(codes: _Codes, activity: np.int64, window: np.uint64) -> np.int64:
    context = np.uint64(context_of(activity)) << np.uint64(LONGEST)
    return np.int64(codes.symbols[context | window & np.uint64((1 << LONGEST) - 1)])


@inlined
def _low(window: np.uint64, width: np.int64) -> np.int64:
    return np.int64(window & ((np.uint64(1) << np.uint64(width)) - np.uint64(1)))
