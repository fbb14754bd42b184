"""Exact selection of the largest magnitudes.

A sample guesses a magnitude that a few more than ``count`` elements reach. One pass over memory then forms ``t`` and
collects those that do; if they are enough, which is nearly certain, the threshold is searched among them alone. If not,
a histogram of magnitudes finds it. Either way the result is exact.
"""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from gradwire.kernels.compensated import Compensated
from gradwire.kernels.cpu._compiled import (
    INFINITE,
    MAGNITUDE,
    PIECE,
    Float32Array,
    UInt32Array,
    allocating,
    array,
    compiled,
    hash32,
)
from gradwire.kernels.cpu._instructions import reaching_mask, trailing_zeros
from gradwire.kernels.cpu._source import Source, of_segment, settle, source_of, within
from gradwire.kernels.parts import Part, of_runs, of_segments, side_by_side
from gradwire.kernels.reference._torch import LANES
from gradwire.layout import Block, Int64Array

SMALL = 4096
"""Segments of at most this many elements are searched whole."""

SAMPLE = 2048
"""Elements that a guess is made from, at most."""

_DIGITS = ((20, 11), (9, 11), (0, 9))
"""Lowest bit and width of the parts of a magnitude that the histogram search fixes one after another."""


_COPIES = 4
"""Counters for each value of a digit, in turn, so that equal neighbours do not wait for one another."""


def topk_select(block: Block, source: Compensated, counts: Int64Array, positions: Tensor, values: Tensor) -> None:
    whole, written = source_of(block, source), np.concatenate(([0], np.cumsum(counts)))
    chosen = array(positions), array(values)

    def select(part: Part) -> None:
        own, segments = part.block, slice(part.segment, part.segment + part.block.segment_count)
        these = slice(written[segments.start], written[segments.stop])
        _select(within(whole, own), own.segment_numels, counts[segments], *(each[these] for each in chosen))

    parts = of_runs(block)
    if block.segment_count > 1 or len(parts) == 1:
        side_by_side(select, of_segments(block))
    else:
        _select_in_parts(whole, block.numel, int(counts[0]), parts, *chosen)


def _select_in_parts(
    source: Source, numel: int, count: int, parts: list[Part], positions: Int64Array, values: Float32Array
) -> None:
    """As :func:`_select`, of a segment whose parts list what reaches the guess."""
    guess = np.uint32(_guess_of(source, numel, count))
    room = max(_room(count, numel), SMALL)

    def collect(part: Part) -> tuple[bool, int, Int64Array, Float32Array]:
        places, candidates = np.empty(room + PIECE, np.int64), np.empty(room + PIECE, np.float32)
        t, own = np.empty(PIECE, np.float32), within(source, part.block)
        finite, found = _collect(own, guess, room, t, places, candidates)
        return finite, found, places[:found], candidates[:found]

    finite, found, places, candidates = zip(*side_by_side(collect, parts), strict=True)
    listed = np.concatenate(places), np.concatenate(candidates)
    _choose_all(source, guess, room, all(finite), sum(found), *listed, positions, values)


@allocating
def _select(
    source: Source, numels: Int64Array, counts: Int64Array, positions: Int64Array, values: Float32Array
) -> None:
    t = np.empty(PIECE, np.float32)
    room = np.int64(SMALL)
    for segment in range(numels.size):
        room = max(room, _room(counts[segment], numels[segment]))
    places = np.empty(room + PIECE, np.int64)
    candidates = np.empty(room + PIECE, np.float32)
    written = 0
    for segment in range(numels.size):
        count = counts[segment]
        own = of_segment(source, segment)
        guess = _guess_of(own, numels[segment], count)
        finite, found = _collect(own, guess, room, t, places, candidates)
        chosen = positions[written : written + count], values[written : written + count]
        _choose_all(own, guess, room, finite, found, places, candidates, chosen[0], chosen[1])
        written += count


@allocating
def _guess_of(source: Source, numel: int, count: int) -> np.uint32:
    """What a segment's candidates are to reach: 0 for all of them, infinity for none."""
    if count == 0:
        return INFINITE
    if numel <= SMALL:
        return np.uint32(0)
    return np.uint32(_guess(source, numel, count, np.empty(SAMPLE, np.int64), np.empty(SAMPLE, np.float32)))


@compiled
def _choose_all(
    source: Source,
    guess: np.uint32,
    room: int,
    finite: bool,
    found: int,
    places: Int64Array,
    candidates: Float32Array,
    positions: Int64Array,
    values: Float32Array,
) -> None:
    """Chooses among a segment's candidates, or all of its values where these are too few or too many."""
    count = positions.size
    if count == 0:
        return
    if not finite:
        _first_positions(source.runs, positions)
        values[:] = np.nan
    elif count <= found <= room:
        threshold, ties = _threshold(candidates[:found], count)
        _choose(places[:found], candidates[:found], threshold, ties, positions, values)
    else:
        if guess == 1 and found < count:
            threshold, ties = 0, count - found  # all that is not zero was found
        else:
            threshold, ties = _threshold_by_histogram(source.runs, source.residual, count)
        _choose_from_runs(source.runs, source.residual, threshold, ties, positions, values)


@compiled
def _sample_size(numel: int) -> int:
    return int(min(SAMPLE, max(numel // 32, 512)))


@compiled
def _sample_rank(count: int, numel: int) -> int:
    """Which of the largest in a sample to guess from: four standard deviations beyond the expected one."""
    expected = count * _sample_size(numel) / numel
    return int(expected + 4 * math.sqrt(expected) + 4)


@compiled
def _room(count: int, numel: int) -> int:
    """Candidates to make room for: twice what a guess is expected to collect, and 0 where it would not pay."""
    if numel <= SMALL or count == 0:
        return 0
    expected = _sample_rank(count, numel) * numel // _sample_size(numel)
    return 2 * expected if expected <= numel // 4 else 0


@compiled
def _guess(source: Source, numel: int, count: int, places: Int64Array, sample: Float32Array) -> np.uint32:
    """A magnitude that somewhat more than ``count`` elements reach, or infinity where collecting would not pay."""
    if _room(count, numel) == 0:
        return INFINITE
    size = _sample_size(numel)
    stride = numel // size
    run, first, runs = 0, 0, source.runs
    for i in range(size):
        drawn = np.uint64(hash32(np.uint32(0), np.uint32(0), np.uint32(i)))
        element = i * stride + np.int64((drawn * np.uint64(stride)) >> np.uint64(32))
        while element - first >= runs[run, 1]:
            first += runs[run, 1]
            run += 1
        places[i] = runs[run, 0] + element - first
    for i in range(size):  # nothing but reading, so that many reads are under way at a time
        sample[i] = source.beta * source.residual[places[i]] + source.gamma * source.gradient[places[i]]
    threshold, _ = _threshold(sample[:size], _sample_rank(count, numel))
    return max(np.uint32(threshold), np.uint32(1))


@allocating
def _collect(
    source: Source, guess: np.uint32, room: int, t: Float32Array, places: Int64Array, candidates: Float32Array
) -> tuple[bool, int]:
    """Leaves ``t`` in the residual and lists the positions and values that reach ``guess``.

    Returns:
        Whether all is finite, and how many are listed: all of them, or more than ``room``.
    """
    masks, firsts = np.empty(PIECE // LANES, np.uint32), np.empty(PIECE // LANES, np.int64)
    finite, found = True, 0
    for start, length, position in source.runs:
        for first in range(0, length, PIECE):
            count = min(PIECE, length - first)
            largest = settle(source, start + first, start + first + count, t)
            finite = finite and largest < INFINITE
            if guess <= largest and found <= room:
                found += list_reaching(
                    t, count, position + first, guess, masks, firsts, places[found:], candidates[found:]
                )
    return finite, found


@compiled
def list_reaching(
    t: Float32Array,
    count: int,
    position: int,
    guess: np.uint32,
    masks: UInt32Array,
    firsts: Int64Array,
    places: Int64Array,
    candidates: Float32Array,
) -> int:
    """Lists those of the first ``count`` values of ``t`` that reach ``guess``, the first at ``position``."""
    if guess == 0:
        for i in range(count):
            places[i] = position + i
            candidates[i] = t[i]
        return count
    t[count : -(-count // LANES) * LANES] = 0
    groups = 0
    for first in range(0, count, LANES):
        masks[groups] = reaching_mask(t, first, guess)
        firsts[groups] = first
        groups += masks[groups] != 0  # if nothing reaches, the next group takes the place: no branch to mispredict
    found = 0
    for group in range(groups):
        mask = masks[group]
        while mask:
            i = firsts[group] + trailing_zeros(mask)
            mask = np.uint32(mask & np.uint32(mask - np.uint32(1)))
            places[found] = position + i
            candidates[found] = t[i]
            found += 1
    return found


@compiled
def _threshold(values: Float32Array, count: int) -> tuple[int, int]:
    """The ``count``-th largest magnitude, found bit by bit, and how many values of just that magnitude to choose."""
    bits = values.view(np.uint32)
    threshold = np.uint32(0)
    for bit in range(30, -1, -1):
        higher = np.uint32(threshold | np.uint32(1) << np.uint32(bit))
        if _count_reaching(bits, higher) >= count:
            threshold = higher
    return int(threshold), count - int(_count_reaching(bits, np.uint32(threshold + np.uint32(1))))


@compiled
def _count_reaching(bits: UInt32Array, threshold: np.uint32) -> int:
    reaching = np.uint32(0)
    for i in range(bits.size):
        reaching = np.uint32(reaching + np.uint32(np.uint32(bits[i] & MAGNITUDE) >= threshold))
    return int(reaching)


@compiled
def _choose(
    places: Int64Array,
    candidates: Float32Array,
    threshold: int,
    ties: int,
    positions: Int64Array,
    values: Float32Array,
) -> None:
    """Copies the candidates above the threshold and the first ``ties`` at it."""
    bits = candidates.view(np.uint32)
    written = 0
    for i in range(bits.size):
        magnitude = bits[i] & MAGNITUDE
        if magnitude >= threshold:
            if magnitude == threshold:
                if ties == 0:
                    continue
                ties -= 1
            positions[written] = places[i]
            values[written] = candidates[i]
            written += 1


@allocating
def _threshold_by_histogram(runs: Int64Array, source: Float32Array, count: int) -> tuple[int, int]:
    """As ``_threshold``, over all of a segment: one pass for each digit of the magnitude."""
    threshold = 0
    for shift, width in _DIGITS:
        histogram = np.zeros((1 << width, _COPIES), np.int64)
        fixed = threshold >> (shift + width)
        for run in range(len(runs)):
            bits = source[runs[run, 0] : runs[run, 0] + runs[run, 1]].view(np.uint32)
            for i in range(bits.size):
                magnitude = bits[i] & MAGNITUDE
                if magnitude >> (shift + width) == fixed:
                    histogram[(magnitude >> shift) & ((1 << width) - 1), i % _COPIES] += 1
        digit = (1 << width) - 1
        while histogram[digit].sum() < count:
            count -= histogram[digit].sum()
            digit -= 1
        threshold |= digit << shift
    return threshold, count


@compiled
def _choose_from_runs(
    runs: Int64Array,
    source: Float32Array,
    threshold: int,
    ties: int,
    positions: Int64Array,
    values: Float32Array,
) -> None:
    """As ``_choose``, from all of a segment."""
    written = 0
    for run in range(len(runs)):
        start, length, position = runs[run]
        piece = source[start : start + length]
        bits = piece.view(np.uint32)
        for i in range(length):
            magnitude = bits[i] & MAGNITUDE
            tied = magnitude == threshold and ties > 0
            positions[written] = position + i  # unless chosen, the next one overwrites it: no branch to mispredict
            values[written] = piece[i]
            written += magnitude > threshold or tied
            ties -= tied
            if written == positions.size:
                return


@compiled
def _first_positions(runs: Int64Array, positions: Int64Array) -> None:
    """The first positions of a segment."""
    written = 0
    for run in range(len(runs)):
        for i in range(min(runs[run, 1], positions.size - written)):
            positions[written] = runs[run, 2] + i
            written += 1
