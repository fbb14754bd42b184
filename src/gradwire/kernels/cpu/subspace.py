"""Rows of a matrix as coordinates in a few directions and what is left, and back: a row at a time, in the cache.

A row meets four directions at a time, for it is as long as they are, and to read it takes as long as to multiply.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor

from gradwire.deferred import Flag
from gradwire.kernels.compensated import Compensated
from gradwire.kernels.cpu._compiled import Float32Array, Float64Array, array, compiled, copy, inlined
from gradwire.kernels.cpu._instructions import fetch
from gradwire.kernels.cpu._lanes import no_lanes, plus_products, put_lanes, sum_of_lanes
from gradwire.kernels.cpu._source import Source, compensation, form
from gradwire.kernels.parts import at_once, side_by_side
from gradwire.kernels.places import Places
from gradwire.kernels.reference._torch import LANES
from gradwire.kernels.reference.subspace import LARGEST_COORDINATE
from gradwire.layout import Block, Int64Array

FOUR = 4

_pieces: WeakKeyDictionary[Places, dict[tuple[str, int], list[Int64Array]]] = WeakKeyDictionary()


def split_rows(block: Block, source: Compensated, basis: Tensor, coordinates: Tensor, out: Tensor) -> None:
    split_rows_each(Places.alone(block, coordinates, basis), source, basis, coordinates, out)


def add_product(block: Block, p: Tensor, q: Tensor, values: Tensor, out: Tensor) -> None:
    add_products(Places.alone(block, p, q), p, q, values, out)


def combine_rows(block: Block, weights: Tensor, values: Tensor, out: Tensor) -> None:
    combine_rows_each(Places.alone(block, weights, out), weights, values, out)


def split_rows_each(rows: Places, source: Compensated, bases: Tensor, coordinates: Tensor, out: Tensor) -> None:
    """``split_rows`` of matrices that share all buffers."""
    values = Source(rows.table, rows.table[:0, 0], *compensation(source))
    given = values, array(bases).reshape(-1), array(coordinates).reshape(-1), array(out)

    def split(pieces: Int64Array) -> None:
        _split(rows.table, pieces, *given, np.empty(rows.longest, np.float32), np.empty((FOUR, LANES), np.float64))

    side_by_side(split, _ranges(rows, "rows"))


def add_products(rows: Places, p: Tensor, q: Tensor, values: Tensor, out: Tensor, only_if: Flag | None = None) -> None:
    """``add_product``, as :func:`split_rows_each`; nothing is done unless the flag holds, if there is one."""
    if only_if is None or only_if:
        given = array(p).reshape(-1), array(q).reshape(-1), array(values), array(out)
        side_by_side(
            lambda pieces: _add_products(rows.table, pieces, *given, np.empty(rows.longest, np.float32)),
            _ranges(rows, "rows"),
        )


def combine_rows_each(rows: Places, weights: Tensor, values: Tensor, out: Tensor) -> None:
    """``combine_rows``, as :func:`split_rows_each`."""
    given = array(weights).reshape(-1), array(values), array(out).reshape(-1)
    side_by_side(lambda pieces: _combine(rows.table, pieces, *given), _ranges(rows, "columns"))


def _ranges(rows: Places, of: str) -> list[Int64Array]:
    """For each thread ``int64[P, 3]``: a matrix, the first of its rows, or columns, and the one after the last."""
    _, counts, lengths = rows.table[:, :3].T
    sizes = counts * lengths
    parts = at_once(int(sizes.sum()))
    known = _pieces.setdefault(rows, {})
    if (of, parts) not in known:
        units, multiple = (counts, 1) if of == "rows" else (lengths, LANES)
        known[of, parts] = _cut(units, sizes, parts, multiple)
    return known[of, parts]


def _cut(units: Int64Array, sizes: Int64Array, parts: int, multiple: int) -> list[Int64Array]:
    """Cuts matrices of so many rows, or columns, and elements into parts of nearly the same size."""
    ends = np.cumsum(sizes)
    edges = np.arange(1, parts) * (ends[-1] if len(ends) else 0) // parts
    matrix = np.searchsorted(ends, edges, side="right")
    within = (edges - (ends - sizes)[matrix]) * units[matrix] // sizes[matrix] // multiple * multiple
    stops = [*zip(matrix.tolist(), within.tolist(), strict=True), (len(units), 0)]
    begins = [(0, 0), *stops[:-1]]
    return [_between(begin, stop, units) for begin, stop in zip(begins, stops, strict=True)]


def _between(begin: tuple[int, int], stop: tuple[int, int], units: Int64Array) -> Int64Array:
    (first, low), (last, high) = begin, stop
    ends = [(k, high if k == last else int(units[k])) for k in range(first, min(last + 1, len(units)))]
    found = [(k, low if k == first else 0, end) for k, end in ends]
    return np.array([each for each in found if each[1] < each[2]], np.int64).reshape(-1, 3)


@compiled
def _split(
    table: Int64Array,
    pieces: Int64Array,
    source: Source,
    bases: Float32Array,
    coordinates: Float32Array,
    out: Float32Array,
    room: Float32Array,
    lanes: Float64Array,
) -> None:
    for piece in range(len(pieces)):
        place = table[pieces[piece, 0]]
        m, rank, apart = place[2], place[3], place[5]
        t, basis = room[:m], bases[place[6] : place[6] + rank * m]
        for i in range(pieces[piece, 1], pieces[piece, 2]):
            first, own = place[0] + i * m, place[4] + i
            form(source, first, first + m, t)
            for low in range(0, rank, FOUR):
                count = min(FOUR, rank - low)
                _dots(t, basis[low * m :], count, lanes, source, out, first + m)
                for k in range(count):
                    exact = float(sum_of_lanes(lanes[k]))
                    fits = abs(exact) < LARGEST_COORDINATE
                    coordinates[own + (low + k) * apart] = np.float32(exact) if fits else np.float32(0)
            _add_multiples(np.float32(-1), coordinates[own : own + rank * apart : apart], basis, t)
            copy(t, out[first : first + m])


@compiled
def _add_products(
    table: Int64Array,
    pieces: Int64Array,
    p: Float32Array,
    q: Float32Array,
    values: Float32Array,
    out: Float32Array,
    room: Float32Array,
) -> None:
    for piece in range(len(pieces)):
        place = table[pieces[piece, 0]]
        m, rank, apart = place[2], place[3], place[5]
        sums, basis = room[:m], q[place[6] : place[6] + rank * m]
        for i in range(pieces[piece, 1], pieces[piece, 2]):
            first, own = place[0] + i * m, place[4] + i
            copy(values[first : first + m], sums)
            _add_multiples(np.float32(1), p[own : own + rank * apart : apart], basis, sums)
            copy(sums, out[first : first + m])


@compiled
def _combine(
    table: Int64Array, pieces: Int64Array, weights: Float32Array, values: Float32Array, out: Float32Array
) -> None:
    for piece in range(len(pieces)):
        place, begin, end = table[pieces[piece, 0]], pieces[piece, 1], pieces[piece, 2]
        n, m, rank = place[1], place[2], place[3]
        for k in range(rank):
            out[place[6] + k * m + begin : place[6] + k * m + end] = np.float32(0)
        for i in range(0, n, FOUR):
            first, many = place[0] + i * m, i + FOUR <= n
            for k in range(rank):
                own = place[4] + k * place[5]
                w = weights[own + i : own + min(i + FOUR, n)]
                sums = out[place[6] + k * m + begin : place[6] + k * m + end]
                if many and w[0] != 0 and w[1] != 0 and w[2] != 0 and w[3] != 0:
                    _add_four(w, values[first : first + FOUR * m], m, begin, sums)
                else:
                    for j in range(w.size):
                        if w[j] != 0:
                            _add_multiple(w[j], values[first + j * m + begin : first + j * m + end], sums)


@inlined
def _add_four(w: Float32Array, rows: Float32Array, m: int, begin: int, sums: Float32Array) -> None:
    """Multiples of four rows, from one column on, one after the other."""
    w0, w1, w2, w3 = w[0], w[1], w[2], w[3]
    b0, b1, b2, b3 = rows[begin:], rows[m + begin :], rows[2 * m + begin :], rows[3 * m + begin :]
    for j in range(sums.size):
        sums[j] = sums[j] + w0 * b0[j] + w1 * b1[j] + w2 * b2[j] + w3 * b3[j]


@inlined
def _dots(
    t: Float32Array,
    directions: Float32Array,
    count: int,
    lanes: Float64Array,
    source: Source,
    out: Float32Array,
    following: int,
) -> None:
    """Of up to four directions, in a row of lanes each; meanwhile the row that follows is fetched."""
    m = t.size
    whole = m // LANES * LANES
    if count == FOUR:
        b0, b1, b2, b3 = directions[:m], directions[m : 2 * m], directions[2 * m : 3 * m], directions[3 * m : 4 * m]
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
        for k in range(count):
            direction, sums = directions[k * m : (k + 1) * m], no_lanes()
            for row in range(0, whole, LANES):
                sums = plus_products(sums, t, direction, row)
            put_lanes(sums, lanes[k])
    for k in range(count):
        for i in range(m - whole):
            lanes[k, i] += np.float64(t[whole + i]) * np.float64(directions[k * m + whole + i])


@inlined
def _add_multiples(sign: np.float32, weights: Float32Array, rows: Float32Array, sums: Float32Array) -> None:
    """One product after the other, in their order."""
    m, fours = sums.size, weights.size // FOUR * FOUR
    for k in range(0, fours, FOUR):
        w0, w1, w2, w3 = sign * weights[k], sign * weights[k + 1], sign * weights[k + 2], sign * weights[k + 3]
        four = rows[k * m : (k + FOUR) * m]
        b0, b1, b2, b3 = four[:m], four[m : 2 * m], four[2 * m : 3 * m], four[3 * m :]
        for j in range(m):
            sums[j] = sums[j] + w0 * b0[j] + w1 * b1[j] + w2 * b2[j] + w3 * b3[j]
    for k in range(fours, weights.size):
        _add_multiple(sign * weights[k], rows[k * m : (k + 1) * m], sums)


@inlined
def _add_multiple(weight: np.float32, row: Float32Array, sums: Float32Array) -> None:
    for j in range(row.size):
        sums[j] += weight * row[j]
