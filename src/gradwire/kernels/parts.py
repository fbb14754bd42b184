"""Parts of a block side by side, on as many threads as torch has for its own: the same bits on any number of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import cache
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch

from gradwire.layout import ALIGNMENT, Block, Int64Array

P = TypeVar("P")
R = TypeVar("R")

LEAST = 1 << 18
"""Elements that are worth a thread, some 100 to 500 microseconds: it takes about 100 to wake one."""

SMALL = 64
"""As many in a rehearsal."""

_least = LEAST


@contextmanager
def small() -> Iterator[None]:
    """Cuts blocks of few elements as well, where there are threads, so that a rehearsal compiles what parts need."""
    global _least
    _least = SMALL
    try:
        yield
    finally:
        _least = LEAST


class Part(NamedTuple):
    """Consecutive elements of a block.

    Attributes:
        block: They alone; positions are those in the whole block.
        run: Of the whole block: the one that the first element is of.
        segment: Its segment.
        element: How many elements come before it.
    """

    block: Block
    run: int
    segment: int
    element: int


def side_by_side(work: Callable[[P], R], parts: Sequence[P]) -> list[R]:
    """What ``work`` makes of each part, in their order; this thread takes parts as well, so that it waits for few."""
    if len(parts) == 1:  # as of most small tensors, which take less time than all that is below
        return [work(parts[0])]
    done: dict[int, R] = {}
    left = iter(range(len(parts)))

    def take() -> None:
        for number in left:
            done[number] = work(parts[number])

    helpers: list[Future[None]] = []
    with suppress(RuntimeError):  # no thread can be begun, as when the interpreter ends: then this one does it all
        for _ in range(1, min(len(parts), torch.get_num_threads())):
            helpers.append(_pool(torch.get_num_threads()).submit(take))
    try:
        take()
    finally:
        wait([each for each in helpers if not each.cancel()])
    for each in helpers:
        if not each.cancelled():
            each.result()
    return [done[number] for number in range(len(parts))]


def ranges(count: int, numel: int, multiple: int = 1) -> list[tuple[int, int]]:
    """Cuts so many rows, of ``numel`` elements in all, into a range for each thread, of whole ``multiple`` but one."""
    parts = min(at_once(numel), -(-count // multiple))
    if parts == 1:
        return [(0, count)]
    edges = _edges(count, parts, multiple)
    return list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))


def of_segments(block: Block) -> list[Part]:
    """Parts of nearly the same size, of whole segments."""
    return _parts(block, "segments", _between_segments)


def of_runs(block: Block, multiple: int = ALIGNMENT) -> list[Part]:
    """Parts of nearly the same size; runs are cut at multiples of so many elements."""
    return _parts(block, ("runs", multiple), lambda block, count: _within_runs(block, count, multiple))


def of_tiles(block: Block, tile: int) -> list[Part]:
    """Parts of nearly the same size, of whole tiles of the block's elements."""
    return _parts(block, tile, lambda block, count: _edges(block.numel, count, tile))


def at_once(numel: int) -> int:
    """Into how many parts to cut: 1 where there is one thread."""
    threads = torch.get_num_threads()
    return 1 if threads == 1 else max(min(threads, numel // _least), 1)


def _parts(block: Block, kind: object, cut: Callable[[Block, int], Iterable[int]]) -> list[Part]:
    count = at_once(block.numel)
    if count == 1:
        return [Part(block, 0, 0, 0)]
    known = _known.setdefault(block, {})
    if (kind, count) not in known:
        edges = np.unique(np.append(np.fromiter(cut(block, count), np.int64), (0, block.numel)))
        known[kind, count] = [_part(block, *each) for each in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)]
    return known[kind, count]


_known: WeakKeyDictionary[Block, dict[tuple[object, int], list[Part]]] = WeakKeyDictionary()


def _edges(count: int, parts: int, multiple: int) -> Int64Array:
    """Where parts of nearly the same size begin, in whole multiples, and where the last one ends."""
    whole = -(-count // multiple)
    return np.minimum(np.arange(parts + 1) * whole // max(parts, 1) * multiple, count)


def _between_segments(block: Block, count: int) -> Int64Array:
    ends: Int64Array = np.cumsum(block.segment_numels)
    return ends[np.searchsorted(ends, np.arange(1, count) * block.numel // count)]


def _within_runs(block: Block, count: int, multiple: int) -> Int64Array:
    edges, ends = np.arange(1, count) * block.numel // count, np.cumsum(block.runs[:, 1])
    firsts = (ends - block.runs[:, 1])[np.searchsorted(ends, edges, side="right")]
    cut: Int64Array = firsts + (edges - firsts) // multiple * multiple
    return cut


def _part(block: Block, low: int, high: int) -> Part:
    """The elements from ``low`` to ``high``, which is more, in the order of runs."""
    ends = np.cumsum(block.runs[:, 1])
    first, last = np.searchsorted(ends, (low, high - 1), side="right").tolist()
    own = slice(first, last + 1)
    runs, origins = block.runs[own].copy(), block.origins[own].copy()
    skipped = low - (ends[first] - block.runs[first, 1])
    runs[0] += skipped, -skipped, skipped
    origins[0] += skipped
    runs[-1, 1] -= ends[last] - high
    segment = int(np.searchsorted(block.segments, first, side="right")) - 1
    segments = block.segments[(block.segments > first) & (block.segments <= last)] - first
    part = Block(
        slots=block.slots,
        runs=runs,
        segments=np.concatenate(([0], segments, [len(runs)])),
        origins=origins,
        streams=block.streams[own],
        slot_of_run=block.slot_of_run[own],
        units=block.units,
    )
    return Part(part, first, segment, low)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "gradwire kernels")


if hasattr(os, "register_at_fork"):  # threads are not copied with a process
    os.register_at_fork(after_in_child=_pool.cache_clear)
