"""Rows of a matrix as coordinates in a few directions and what is left, and back: a row at a time, in the cache."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gradwire.kernels.compensated import Compensated
from gradwire.kernels.cpu._compiled import Float32Array, Float64Array, array, compiled, inlined, sum_of_lanes
from gradwire.kernels.cpu._source import Source, form, source_of
from gradwire.kernels.reference._torch import LANES
from gradwire.kernels.reference.subspace import LARGEST_COORDINATE
from gradwire.layout import Block


def split_rows(block: Block, source: Compensated, basis: Tensor, coordinates: Tensor, out: Tensor) -> None:
    t, lanes = np.empty(basis.shape[1], np.float32), np.empty(LANES, np.float64)
    _split(source_of(block, source), array(basis), array(coordinates), t, lanes, array(out))


def add_product(block: Block, p: Tensor, q: Tensor, values: Tensor, out: Tensor) -> None:
    sums = np.empty(q.shape[1], np.float32)
    _add_product(int(block.runs[0, 0]), array(p), array(q), array(values), array(out), sums)


def combine_rows(block: Block, weights: Tensor, values: Tensor, out: Tensor) -> None:
    _combine(int(block.runs[0, 0]), array(weights), array(values), array(out))


@compiled
def _split(
    source: Source,
    basis: Float32Array,
    coordinates: Float32Array,
    t: Float32Array,
    lanes: Float64Array,
    out: Float32Array,
) -> None:
    (rank, m), n = basis.shape, coordinates.shape[1]
    for i in range(n):
        first = source.runs[0, 0] + i * m
        form(source, first, first + m, t)
        for k in range(rank):
            exact = _dot(t, basis[k], lanes)
            coordinates[k, i] = np.float32(exact) if abs(exact) < LARGEST_COORDINATE else np.float32(0)
        for k in range(rank):
            _add_multiple(-coordinates[k, i], basis[k], t)
        _copy(t, out[first : first + m])


@compiled
def _add_product(
    start: int, p: Float32Array, q: Float32Array, values: Float32Array, out: Float32Array, sums: Float32Array
) -> None:
    (rank, n), m = p.shape, q.shape[1]
    for i in range(n):
        first = start + i * m
        _copy(values[first : first + m], sums)
        for k in range(rank):
            _add_multiple(p[k, i], q[k], sums)
        _copy(sums, out[first : first + m])


@compiled
def _combine(start: int, weights: Float32Array, values: Float32Array, out: Float32Array) -> None:
    (rank, n), m = weights.shape, out.shape[1]
    out[:] = np.float32(0)
    for i in range(n):
        row = values[start + i * m : start + i * m + m]
        for k in range(rank):
            if weights[k, i] != 0:
                _add_multiple(weights[k, i], row, out[k])


@inlined
def _dot(t: Float32Array, direction: Float32Array, lanes: Float64Array) -> float:
    lanes[:] = 0.0
    whole = t.size // LANES * LANES
    for row in range(0, whole, LANES):
        t_row, direction_row = t[row : row + LANES], direction[row : row + LANES]
        for i in range(LANES):
            lanes[i] += np.float64(t_row[i]) * np.float64(direction_row[i])
    for i in range(t.size - whole):
        lanes[i] += np.float64(t[whole + i]) * np.float64(direction[whole + i])
    return float(sum_of_lanes(lanes))


@inlined
def _add_multiple(weight: np.float32, row: Float32Array, sums: Float32Array) -> None:
    for j in range(row.size):
        sums[j] += weight * row[j]


@inlined
def _copy(row: Float32Array, copied: Float32Array) -> None:
    for j in range(row.size):
        copied[j] = row[j]
