"""Sums, maxima and counts of segments, in one pass over memory each: of chunks first, which are added up in order."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gradwire.kernels.compensated import Compensated
from gradwire.kernels.cpu._compiled import INFINITE, UInt32Array, allocating, array, compiled
from gradwire.kernels.cpu._lanes import add_chunk, add_rest, sum_of_magnitudes
from gradwire.kernels.cpu._source import Source, settle, source_of, within
from gradwire.kernels.parts import Part, of_runs, side_by_side
from gradwire.kernels.reference._torch import CHUNK, LANES
from gradwire.layout import Block, Float32Array, Float64Array, Int64Array


def magnitude_statistics(block: Block, source: Compensated) -> tuple[Float64Array, Float32Array]:
    totals, largest = np.empty(block.segment_count), np.empty(block.segment_count, np.float32)
    counts, whole = -(-block.runs[:, 1] // CHUNK), source_of(block, source)
    ends = np.cumsum(counts)
    sums, maxima = np.empty(counts.sum()), np.empty(counts.sum(), np.uint32)

    def add_up(part: Part) -> None:
        before = int(part.block.origins[0] - block.origins[part.run]) // CHUNK
        first = ends[part.run] - counts[part.run] + before
        _add_up_chunks(within(whole, part.block), sums[first:], maxima[first:])

    if len(counts):
        side_by_side(add_up, of_runs(block, CHUNK))
    _statistics(block.segments, counts, sums, maxima, np.empty(LANES), totals, largest)
    return totals, largest


def sign_counts(block: Block, source: Tensor) -> tuple[Int64Array, Int64Array]:
    above, below = np.zeros(block.segment_count, np.int64), np.zeros(block.segment_count, np.int64)
    _sign_counts(block.runs, block.segments, array(source), above, below)
    return above, below


def exceedances(block: Block, source: Tensor, thresholds: Float32Array) -> tuple[Int64Array, Float64Array]:
    counts, totals = np.zeros(block.segment_count, np.int64), np.zeros(block.segment_count)
    _exceedances(block.runs, block.segments, array(source), thresholds, counts, totals)
    return counts, totals


@allocating
def _add_up_chunks(source: Source, sums: Float64Array, maxima: UInt32Array) -> None:
    t, lanes, chunk = np.empty(CHUNK, np.float32), np.empty(LANES, np.float64), 0
    for start, length, _ in source.runs:
        for low in range(start, start + length, CHUNK):
            high = min(low + CHUNK, start + length)
            maxima[chunk] = settle(source, low, high, t)
            sums[chunk] = sum_of_magnitudes(t[: high - low], lanes)
            chunk += 1


@compiled
def _statistics(
    segments: Int64Array,
    counts: Int64Array,
    sums: Float64Array,
    maxima: UInt32Array,
    lanes: Float64Array,
    totals: Float64Array,
    largest: Float32Array,
) -> None:
    """Of segments, by those of chunks, of which each run has so many."""
    chunk, bits = 0, largest.view(np.uint32)
    for segment in range(totals.size):
        total, maximum, number = 0.0, np.uint32(0), 0
        for run in range(segments[segment], segments[segment + 1]):
            for _ in range(counts[run]):
                maximum = max(maximum, maxima[chunk])
                total = add_chunk(total, number, sums[chunk], lanes)
                number += 1
                chunk += 1
        total = add_rest(total, number, lanes)
        finite = maximum < INFINITE
        totals[segment] = total if finite else np.nan
        bits[segment] = maximum
        if not finite:
            largest[segment] = np.nan


@compiled
def _sign_counts(
    runs: Int64Array, segments: Int64Array, source: Float32Array, above: Int64Array, below: Int64Array
) -> None:
    for segment in range(above.size):
        for run in range(segments[segment], segments[segment + 1]):
            start, length = runs[run, 0], runs[run, 1]
            for first in range(0, length, CHUNK):
                piece = source[start + first : start + min(first + CHUNK, length)]
                positive, negative = np.uint32(0), np.uint32(0)
                for i in range(piece.size):
                    positive = np.uint32(positive + np.uint32(piece[i] > 0))
                    negative = np.uint32(negative + np.uint32(piece[i] < 0))
                above[segment] += positive
                below[segment] += negative


@allocating
def _exceedances(
    runs: Int64Array,
    segments: Int64Array,
    source: Float32Array,
    thresholds: Float32Array,
    counts: Int64Array,
    totals: Float64Array,
) -> None:
    t = np.empty(CHUNK, np.float32)
    lanes, of_chunks = np.empty(LANES, np.float64), np.empty(LANES, np.float64)
    for segment in range(counts.size):
        threshold, total, chunk = thresholds[segment], 0.0, 0
        if np.isnan(threshold):
            continue
        for run in range(segments[segment], segments[segment + 1]):
            start, length = runs[run, 0], runs[run, 1]
            for first in range(0, length, CHUNK):
                piece = source[start + first : start + min(first + CHUNK, length)]
                reaching = np.uint32(0)
                for i in range(piece.size):
                    exceeds = abs(piece[i]) >= threshold
                    reaching = np.uint32(reaching + np.uint32(exceeds))
                    t[i] = piece[i] if exceeds else np.float32(0)
                counts[segment] += reaching
                total = add_chunk(total, chunk, sum_of_magnitudes(t[: piece.size], lanes), of_chunks)
                chunk += 1
        totals[segment] = add_rest(total, chunk, of_chunks)
