"""Rows of a matrix as coordinates in a few directions and what is left, and back: a row at a time, in the cache.

A row meets four directions at a time, for it is as long as they are, and to read it takes as long as to multiply.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gradwire.kernels.compensated import Compensated
from gradwire.kernels.cpu._compiled import Float32Array, Float64Array, array, compiled, copy, inlined
from gradwire.kernels.cpu._instructions import fetch
from gradwire.kernels.cpu._lanes import no_lanes, plus_products, put_lanes, sum_of_lanes
from gradwire.kernels.cpu._source import Source, form, source_of
from gradwire.kernels.parts import ranges, side_by_side
from gradwire.kernels.reference._torch import LANES
from gradwire.kernels.reference.subspace import LARGEST_COORDINATE
from gradwire.layout import Block

FOUR = 4


def split_rows(block: Block, source: Compensated, basis: Tensor, coordinates: Tensor, out: Tensor) -> None:
    given = source_of(block, source), array(basis), array(coordinates), array(out)

    def split(rows: tuple[int, int]) -> None:
        t, lanes = np.empty(basis.shape[1], np.float32), np.empty((FOUR, LANES), np.float64)
        _split(*given, *rows, t, lanes)

    side_by_side(split, ranges(coordinates.shape[1], block.numel))


def add_product(block: Block, p: Tensor, q: Tensor, values: Tensor, out: Tensor) -> None:
    given = int(block.runs[0, 0]), array(p), array(q), array(values), array(out)
    side_by_side(
        lambda rows: _add_product(*given, *rows, np.empty(q.shape[1], np.float32)), ranges(p.shape[1], block.numel)
    )


def combine_rows(block: Block, weights: Tensor, values: Tensor, out: Tensor) -> None:
    given = int(block.runs[0, 0]), array(weights), array(values), array(out)
    side_by_side(lambda columns: _combine(*given, *columns), ranges(out.shape[1], block.numel, LANES))


@compiled
def _split(
    source: Source,
    basis: Float32Array,
    coordinates: Float32Array,
    out: Float32Array,
    begin: int,
    end: int,
    t: Float32Array,
    lanes: Float64Array,
) -> None:
    rank, m = basis.shape
    for i in range(begin, end):
        first = source.runs[0, 0] + i * m
        form(source, first, first + m, t)
        for low in range(0, rank, FOUR):
            directions = basis[low : low + FOUR]
            _dots(t, directions, lanes, source, out, first + m)
            for k in range(len(directions)):
                exact = float(sum_of_lanes(lanes[k]))
                coordinates[low + k, i] = np.float32(exact) if abs(exact) < LARGEST_COORDINATE else np.float32(0)
        _add_multiples(np.float32(-1), coordinates[:, i], basis, t)
        copy(t, out[first : first + m])


@compiled
def _add_product(
    start: int,
    p: Float32Array,
    q: Float32Array,
    values: Float32Array,
    out: Float32Array,
    begin: int,
    end: int,
    sums: Float32Array,
) -> None:
    m = q.shape[1]
    for i in range(begin, end):
        first = start + i * m
        copy(values[first : first + m], sums)
        _add_multiples(np.float32(1), p[:, i], q, sums)
        copy(sums, out[first : first + m])


@compiled
def _combine(start: int, weights: Float32Array, values: Float32Array, out: Float32Array, begin: int, end: int) -> None:
    (rank, n), m = weights.shape, out.shape[1]
    for k in range(rank):
        out[k, begin:end] = np.float32(0)
    for i in range(0, n, FOUR):
        first, many = start + i * m, i + FOUR <= n
        for k in range(rank):
            w = weights[k, i : i + FOUR]
            if many and w[0] != 0 and w[1] != 0 and w[2] != 0 and w[3] != 0:
                _add_four(w, values[first : first + FOUR * m], m, begin, out[k, begin:end])
            else:
                for j in range(w.size):
                    if w[j] != 0:
                        _add_multiple(w[j], values[first + j * m + begin : first + j * m + end], out[k, begin:end])


@inlined
def _add_four(w: Float32Array, rows: Float32Array, m: int, begin: int, sums: Float32Array) -> None:
    """Multiples of four rows, from one column on, one after the other."""
    w0, w1, w2, w3 = w[0], w[1], w[2], w[3]
    b0, b1, b2, b3 = rows[begin:], rows[m + begin :], rows[2 * m + begin :], rows[3 * m + begin :]
    for j in range(sums.size):
        sums[j] = sums[j] + w0 * b0[j] + w1 * b1[j] + w2 * b2[j] + w3 * b3[j]


@inlined
def _dots(
    t: Float32Array, directions: Float32Array, lanes: Float64Array, source: Source, out: Float32Array, following: int
) -> None:
    """Of up to four directions, in a row of lanes each; meanwhile the row that follows is fetched."""
    whole = t.size // LANES * LANES
    if len(directions) == FOUR:
        b0, b1, b2, b3 = directions[0], directions[1], directions[2], directions[3]
        s0 = s1 = s2 = s3 = no_lanes()
        for row in range(0, whole, LANES):
            fetch(source.gradient, following + row)
            fetch(source.residual, following + row)
            fetch(out, following + row)
            s0, s1 = plus_products(s0, t, b0, row), plus_products(s1, t, b1, row)
            s2, s3 = plus_products(s2, t, b2, row), plus_products(s3, t, b3, row)
        put_lanes(s0, lanes[0])
        put_lanes(s1, lanes[1])
        put_lanes(s2, lanes[2])
        put_lanes(s3, lanes[3])
    else:
        for k in range(len(directions)):
            direction, sums = directions[k], no_lanes()
            for row in range(0, whole, LANES):
                sums = plus_products(sums, t, direction, row)
            put_lanes(sums, lanes[k])
    for k in range(len(directions)):
        for i in range(t.size - whole):
            lanes[k, i] += np.float64(t[whole + i]) * np.float64(directions[k, whole + i])


@inlined
def _add_multiples(sign: np.float32, weights: Float32Array, rows: Float32Array, sums: Float32Array) -> None:
    """One product after the other, in their order."""
    fours = len(rows) // FOUR * FOUR
    for k in range(0, fours, FOUR):
        w0, w1, w2, w3 = sign * weights[k], sign * weights[k + 1], sign * weights[k + 2], sign * weights[k + 3]
        b0, b1, b2, b3 = rows[k], rows[k + 1], rows[k + 2], rows[k + 3]
        for j in range(sums.size):
            sums[j] = sums[j] + w0 * b0[j] + w1 * b1[j] + w2 * b2[j] + w3 * b3[j]
    for k in range(fours, len(rows)):
        _add_multiple(sign * weights[k], rows[k], sums)


@inlined
def _add_multiple(weight: np.float32, row: Float32Array, sums: Float32Array) -> None:
    for j in range(row.size):
        sums[j] += weight * row[j]
