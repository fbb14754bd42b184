"""What encoders read, as compiled functions take it: the compensated values of runs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gradwire.kernels.compensated import Compensated
from gradwire.kernels.cpu._compiled import (
    INFINITE,
    MAGNITUDE,
    PIECE,
    Float32Array,
    Float64Array,
    allocating,
    array,
    compiled,
    inlined,
    largest_magnitude,
    written_out,
)
from gradwire.kernels.cpu._lanes import add_chunk, add_rest, no_lanes, plus_terms, put_lanes, sum_of_lanes
from gradwire.kernels.reference._torch import CHUNK, LANES
from gradwire.layout import Block, Int64Array


class Source(NamedTuple):
    """``t = beta * residual + gamma * gradient`` over the runs of a block, or of one of its segments.

    Attributes:
        runs: As of :class:`gradwire.layout.Block`.
        segments: As of the block, if these are its runs.
        gradient: The flat buffer.
        residual: Laid out alike. Without one the gradient stands in for it, so that ``0 * gradient + 1 * gradient`` is
            ``t``.
        keep: Whether there is one.
        beta: Weight of the residual.
        gamma: Weight of the gradient.
    """

    runs: Int64Array
    segments: Int64Array
    gradient: Float32Array
    residual: Float32Array
    keep: bool
    beta: np.float32
    gamma: np.float32


def source_of(block: Block, source: Compensated) -> Source:
    """The arrays of a block's compensated values."""
    return Source(block.runs, block.segments, *compensation(source))


def within(source: Source, block: Block) -> Source:
    """The values of a part of its block."""
    if block.runs is source.runs and block.segments is source.segments:
        return source
    return source._replace(runs=block.runs, segments=block.segments)


def compensation(source: Compensated) -> tuple[Float32Array, Float32Array, bool, np.float32, np.float32]:
    """Gradient, residual, whether there is one, and the weights that make ``t`` of them."""
    gradient, residual, beta, gamma = source
    if residual is None:
        return array(gradient), array(gradient), False, np.float32(0), np.float32(1)
    return array(gradient), array(residual), True, np.float32(beta), np.float32(gamma)


@written_out
def of_segment(source: Source, segment: int) -> Source:
    """The values of one segment of a block."""
    runs, segments, gradient, residual, keep, beta, gamma = source
    return Source(runs[segments[segment] : segments[segment + 1]], segments, gradient, residual, keep, beta, gamma)


@inlined
def form(source: Source, low: int, high: int, t: Float32Array) -> None:
    """Writes ``t`` between two elements of the buffer."""
    gradient, residual, beta, gamma = source.gradient[low:high], source.residual[low:high], source.beta, source.gamma
    for i in range(gradient.size):
        t[i] = beta * residual[i] + gamma * gradient[i]


@compiled
def settle(source: Source, low: int, high: int, t: Float32Array) -> np.uint32:
    """As :func:`form`, and leaves ``t`` in the residual where finite; bits of its largest magnitude."""
    if not source.keep:
        form(source, low, high, t)
        return np.uint32(largest_magnitude(t[: high - low]))
    gradient, residual, beta, gamma = source.gradient[low:high], source.residual[low:high], source.beta, source.gamma
    largest = np.uint32(0)
    for i in range(gradient.size):
        value = np.float32(beta * residual[i] + gamma * gradient[i])
        magnitude = np.uint32(value.view(np.uint32) & MAGNITUDE)
        largest = max(largest, magnitude)
        t[i] = value
        residual[i] = value if magnitude < INFINITE else residual[i]
    return largest


@allocating
def settle_all(source: Source) -> bool:
    """Leaves ``t`` in the residual where finite; whether all is."""
    t, finite = np.empty(PIECE, np.float32), True
    for start, length, _ in source.runs:
        for first in range(0, length, PIECE):
            finite = settle(source, start + first, start + min(first + PIECE, length), t) < INFINITE and finite
    return finite


@inlined
def numel(source: Source) -> int:
    """How many values there are."""
    return int(source.runs[:, 1].sum())


@inlined
def peak(source: Source) -> np.uint32:
    """Bits of the largest ``|t|``; at least ``INFINITE`` if any is not finite."""
    largest, beta, gamma = np.uint32(0), source.beta, source.gamma
    for run in range(len(source.runs)):
        low, high = source.runs[run, 0], source.runs[run, 0] + source.runs[run, 1]
        gradient, residual = source.gradient[low:high], source.residual[low:high]
        for i in range(gradient.size):
            t = np.float32(beta * residual[i] + gamma * gradient[i])
            largest = max(largest, np.uint32(t.view(np.uint32) & MAGNITUDE))
    return largest


@inlined
def total(source: Source, squared: bool, lanes: Float64Array) -> float:
    """Sum of ``|t|`` or of ``t * t``, in the order the reference defines; not finite if any ``t`` is not."""
    total, chunks = 0.0, 0
    for run in range(len(source.runs)):
        low, high = source.runs[run, 0], source.runs[run, 0] + source.runs[run, 1]
        gradient, residual = source.gradient[low:high], source.residual[low:high]
        total = _add_run(total, chunks, gradient, residual, source.beta, source.gamma, squared, lanes)
        chunks += -(-gradient.size // CHUNK)
    return float(add_rest(total, chunks, lanes[1]))


@compiled
def total_magnitude(t: Float32Array, lanes: Float64Array) -> float:
    """Sum of ``|t|`` of one run, in the order the reference defines; not finite if any ``t`` is not."""
    return float(_of_run(t, False, lanes))


@compiled
def total_square(t: Float32Array, lanes: Float64Array) -> float:
    """As :func:`total_magnitude`, of ``t * t``."""
    return float(_of_run(t, True, lanes))


@inlined
def _of_run(t: Float32Array, squared: bool, lanes: Float64Array) -> float:
    total = _add_run(0.0, 0, t, t, np.float32(0), np.float32(1), squared, lanes)
    return float(add_rest(total, -(-t.size // CHUNK), lanes[1]))


@inlined
def _add_run(
    total: float,
    chunk: int,
    gradient: Float32Array,
    residual: Float32Array,
    beta: np.float32,
    gamma: np.float32,
    squared: bool,
    lanes: Float64Array,
) -> float:
    """Adds a run to a segment's total, from the chunk of this number on; ``lanes`` are those of a chunk, and of chunks.

    As :func:`add_chunk` does.
    """
    for first in range(0, gradient.size, CHUNK):
        g, r = gradient[first : first + CHUNK], residual[first : first + CHUNK]
        whole, sums = g.size // LANES * LANES, no_lanes()
        for row in range(0, whole, LANES):
            sums = plus_terms(sums, g, r, row, beta, gamma, squared)
        put_lanes(sums, lanes[0])
        for i in range(g.size - whole):
            lanes[0, i] += _term(beta * r[whole + i] + gamma * g[whole + i], squared)
        total = add_chunk(total, chunk + first // CHUNK, sum_of_lanes(lanes[0]), lanes[1])
    return total


@inlined
def _term(t: np.float32, squared: bool) -> float:
    exact = np.float64(t)
    return float(exact * exact if squared else abs(exact))
