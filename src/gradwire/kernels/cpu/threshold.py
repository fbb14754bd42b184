"""Coordinates that reach a threshold, in passes over memory that list what they find."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels.compensated import Compensated
from gradwire.kernels.cpu._compiled import (
    INFINITE,
    PIECE,
    UInt32Array,
    allocating,
    array,
    compiled,
    copy,
    hash32,
    largest_magnitude,
)
from gradwire.kernels.cpu._instructions import reaching_mask, trailing_zeros
from gradwire.kernels.cpu._source import Source, settle, source_of
from gradwire.kernels.cpu.topk import list_reaching
from gradwire.kernels.reference._torch import LANES
from gradwire.kernels.reference.threshold import LARGEST
from gradwire.layout import Block, Float32Array, Int64Array
from gradwire.randomness import run_keys


def collect_reaching(
    block: Block, source: Compensated, thresholds: Float32Array, room: int
) -> tuple[Tensor, Tensor, Int64Array]:
    counts = np.empty(len(block.runs), np.int64)
    found = _collect_reaching(source_of(block, source), thresholds, room, counts)
    return *_tensors(*found), counts


def collect_drawn(
    block: Block, source: Compensated, thresholds: Float32Array, room: int, key: int
) -> tuple[Tensor, Tensor, Int64Array]:
    counts = np.empty(len(block.runs), np.int64)
    keys = run_keys(key, block.streams).view(np.uint32).reshape(-1, 2)
    found = _collect_drawn(source_of(block, source), thresholds, room, keys, block.origins, counts)
    return *_tensors(*found), counts


def collect_unambiguous(
    block: Block,
    source: Compensated,
    squares: Tensor | None,
    moments: Tensor,
    alpha: float,
    decay: float,
    threshold: float,
    room: int,
) -> tuple[Tensor, Tensor, Int64Array]:
    counts = np.empty(len(block.runs), np.int64)
    found = _collect_unambiguous(
        source_of(block, source),
        array(moments if squares is None else squares),
        squares is not None,
        array(moments),
        alpha,
        np.float32(decay),
        np.float32(threshold),
        room,
        counts,
    )
    return *_tensors(*found), counts


def collect_local_maxima(
    block: Block, source: Compensated, bins: Int64Array, room: int
) -> tuple[Tensor, Tensor, Int64Array, Float32Array]:
    counts = np.empty(len(block.runs), np.int64)
    scales = np.zeros(block.segment_count, np.float32)
    found = _collect_local_maxima(source_of(block, source), bins, room, counts, scales)
    return *_tensors(*found), counts, scales


def _tensors(places: Int64Array, candidates: Float32Array, found: int) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(places[:found]), torch.from_numpy(candidates[:found])


@allocating
def _roomy(places: Int64Array, candidates: Float32Array, found: int, more: int) -> tuple[Int64Array, Float32Array]:
    """The lists, with room for ``more`` beyond the first ``found``."""
    if found + more <= places.size:
        return places, candidates
    size = max(found + more, 2 * places.size)
    wider, longer = np.empty(size, np.int64), np.empty(size, np.float32)
    copy(places[:found], wider)
    copy(candidates[:found], longer)
    return wider, longer


@allocating
def _collect_reaching(
    source: Source,
    thresholds: Float32Array,
    room: int,
    counts: Int64Array,
) -> tuple[Int64Array, Float32Array, np.int64]:
    places, candidates = np.empty(room + PIECE, np.int64), np.empty(room + PIECE, np.float32)
    masks, firsts = np.empty(PIECE // LANES, np.uint32), np.empty(PIECE // LANES, np.int64)
    t, bits, found = np.empty(PIECE, np.float32), thresholds.view(np.uint32), np.int64(0)
    runs, segments = source.runs, source.segments
    for segment in range(thresholds.size):
        wanted, begin = not np.isnan(thresholds[segment]), found
        threshold = max(bits[segment], np.uint32(1))
        for run in range(segments[segment], segments[segment + 1]):
            start, length, position = runs[run]
            before = found
            for first in range(0, length, PIECE):
                count = min(PIECE, length - first)
                finite = settle(source, start + first, start + first + count, t) < INFINITE
                wanted = wanted and finite
                if wanted:
                    places, candidates = _roomy(places, candidates, found, count)
                    found += list_reaching(
                        t, count, position + first, threshold, masks, firsts, places[found:], candidates[found:]
                    )
            counts[run] = found - before
        if not wanted:
            found = begin
            counts[segments[segment] : segments[segment + 1]] = -1
    return places, candidates, found


@allocating
def _collect_drawn(
    source: Source,
    thresholds: Float32Array,
    room: int,
    keys: UInt32Array,
    origins: Int64Array,
    counts: Int64Array,
) -> tuple[Int64Array, Float32Array, np.int64]:
    places, candidates = np.empty(room + PIECE, np.int64), np.empty(room + PIECE, np.float32)
    t, marked, found = np.empty(PIECE, np.float32), np.empty(PIECE, np.float32), np.int64(0)
    runs, segments = source.runs, source.segments
    for segment in range(thresholds.size):
        wanted, begin = not np.isnan(thresholds[segment]), found
        share = np.float32(thresholds[segment])
        for run in range(segments[segment], segments[segment + 1]):
            start, length, position = runs[run]
            before, low, high, origin = found, keys[run, 0], keys[run, 1], np.uint32(origins[run])
            for first in range(0, length, PIECE):
                count = min(PIECE, length - first)
                finite = settle(source, start + first, start + first + count, t) < INFINITE
                wanted = wanted and finite
                if wanted:
                    for i in range(count):
                        drawn = hash32(low, high, np.uint32(origin + np.uint32(first + i))) >> np.uint32(8)
                        least = np.float32(np.float32(drawn) * np.float32(2.0**-24)) * share
                        marked[i] = t[i] if abs(t[i]) > least else np.float32(0)
                    places, candidates = _roomy(places, candidates, found, count)
                    found = _list_marked(marked[:count], position + first, places, candidates, found)
            counts[run] = found - before
        if not wanted:
            found = begin
            counts[segments[segment] : segments[segment + 1]] = -1
    return places, candidates, found


@compiled
def _list_marked(marked: Float32Array, position: int, places: Int64Array, candidates: Float32Array, found: int) -> int:
    """Lists the few values that are not zero, the first one at ``position``, from ``found`` on."""
    whole = marked.size // LANES * LANES
    for first in range(0, whole, LANES):
        mask = reaching_mask(marked, first, np.uint32(1))
        while mask:
            i = first + trailing_zeros(mask)
            mask = np.uint32(mask & np.uint32(mask - np.uint32(1)))
            places[found] = position + i
            candidates[found] = marked[i]
            found += 1
    for i in range(whole, marked.size):
        if marked[i] != 0:
            places[found] = position + i
            candidates[found] = marked[i]
            found += 1
    return found


@allocating
def _collect_unambiguous(
    source: Source,
    squares: Float32Array,
    given: bool,
    moments: Float32Array,
    alpha: float,
    decay: np.float32,
    threshold: np.float32,
    room: int,
    counts: Int64Array,
) -> tuple[Int64Array, Float32Array, np.int64]:
    places, candidates = np.empty(room + PIECE, np.int64), np.empty(room + PIECE, np.float32)
    forgotten, products, marks = np.zeros(PIECE, np.float32), np.empty(PIECE, np.float32), np.empty(PIECE, np.float32)
    runs, segments, gradient, residual, keep, beta, gamma = source
    found = np.int64(0)
    for segment in range(segments.size - 1):
        finite, begin = True, found
        for run in range(segments[segment], segments[segment + 1]):
            start, length, position = runs[run]
            before = found
            for first in range(0, length, PIECE):
                low, high = start + first, start + min(first + PIECE, length)
                g, v, marked = gradient[low:high], moments[low:high], marks[: high - low]
                memory = residual[low:high] if keep else forgotten[: high - low]
                square = squares[low:high] if given else products[: high - low]
                if not given:
                    for i in range(g.size):
                        square[i] = g[i] * g[i]
                finite = _mark(g, memory, beta, gamma, square, v, alpha, decay, threshold, marked) and finite
                if given:
                    square[:] = 0
                if finite:
                    places, candidates = _roomy(places, candidates, found, marked.size)
                    found = _list_marked(marked, position + first, places, candidates, found)
            counts[run] = found - before
        if not finite:
            found = begin
            counts[segments[segment] : segments[segment + 1]] = -1
    return places, candidates, found


@compiled
def _mark(
    gradient: Float32Array,
    memory: Float32Array,
    beta: np.float32,
    gamma: np.float32,
    squares: Float32Array,
    moments: Float32Array,
    alpha: float,
    decay: np.float32,
    threshold: np.float32,
    marked: Float32Array,
) -> bool:
    """One pass: ``t`` to the memory, ``v`` to the moments, where ``t`` is finite; returns whether all is.

    ``marked`` is left with ``t`` where it is wanted, and zero elsewhere.
    """
    limit, gaps = np.float32(LARGEST), np.uint32(0)
    for i in range(marked.size):
        t, v = beta * memory[i] + gamma * gradient[i], moments[i]
        finite = abs(t) < np.float32(np.inf)
        summed = v + squares[i]
        grown = v if np.isnan(summed) else min(summed, limit)
        wide = np.float64(t)
        wanted = finite & (wide * wide > alpha * np.float64(grown)) & (abs(t) > threshold)
        following = grown if wanted else grown * decay
        memory[i] = t if finite else memory[i]
        moments[i] = following if finite else v
        marked[i] = t if wanted else np.float32(0)
        gaps = np.uint32(gaps + np.uint32(not finite))
    return bool(gaps == 0)


@allocating
def _collect_local_maxima(
    source: Source,
    bins: Int64Array,
    room: int,
    counts: Int64Array,
    scales: Float32Array,
) -> tuple[Int64Array, Float32Array, np.int64]:
    runs, segments, widest = source.runs, source.segments, PIECE
    for run in range(bins.size):
        widest = max(widest, min(bins[run], runs[run, 1]))
    places, candidates = np.empty(room + widest, np.int64), np.empty(room + widest, np.float32)
    t, ahead = np.empty(widest, np.float32), np.zeros(widest + LANES, np.float32)
    largest_bits = np.empty(1, np.uint32)
    largest = largest_bits.view(np.float32)
    found = np.int64(0)
    for segment in range(scales.size):
        total, bins_seen, finite, begin = 0.0, 0, True, found
        for run in range(segments[segment], segments[segment + 1]):
            start, length, position = runs[run]
            before = found
            width = min(bins[run], length)
            step = max(PIECE // width, 1) * width
            for first in range(0, length, step):
                low, high = start + first, start + min(first + step, length)
                finite = settle(source, low, high, t) < INFINITE and finite
                values, g, gamma = t[: high - low], source.gradient[low:high], source.gamma
                for i in range(values.size):
                    ahead[i] = values[i] + gamma * g[i]
                if finite:
                    places, candidates = _roomy(places, candidates, found, values.size)
                for lower in range(0, values.size, width):
                    upper = min(lower + width, values.size)
                    largest_bits[0] = largest_magnitude(values[lower:upper])
                    total += np.float64(largest[0])
                    bins_seen += 1
                    if finite:
                        threshold = max(largest_bits[0], np.uint32(1))
                        found = _list_ahead(
                            ahead, values, lower, upper, position + first, threshold, places, candidates, found
                        )
            counts[run] = found - before
        if finite:
            scales[segment] = np.float32(total / bins_seen)
        else:
            found = begin
            counts[segments[segment] : segments[segment + 1]] = -1
    return places, candidates, found


@compiled
def _list_ahead(
    ahead: Float32Array,
    values: Float32Array,
    lower: int,
    upper: int,
    position: int,
    threshold: np.uint32,
    places: Int64Array,
    candidates: Float32Array,
    found: int,
) -> int:
    """Lists the values but zeros of a bin where the bits of ``|ahead|`` reach the threshold, from ``found`` on."""
    for first in range(lower, upper, LANES):
        mask = reaching_mask(ahead, first, threshold)
        if upper - first < LANES:
            mask = np.uint32(mask & np.uint32((1 << (upper - first)) - 1))
        while mask:
            i = first + trailing_zeros(mask)
            mask = np.uint32(mask & np.uint32(mask - np.uint32(1)))
            places[found] = position + i
            candidates[found] = values[i]
            found += values[i] != 0
    return found
