"""Orthonormal rows, a matrix at a time."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from gradwire.exact import HALF_GRID, MEASURED_ONCE, NEWTON_STEPS, TO_GRID
from gradwire.kernels.cpu._compiled import (
    Float32Array,
    Float64Array,
    allocating,
    array,
    compiled,
    copy,
    inlined,
    summing,
)

PANEL = 8
"""Rows by which each other row is reflected, one after the other, while they are in a nearer cache."""


def orthonormalise(rows: Tensor) -> None:
    for matrix in array(rows):
        _orthonormalise(matrix)


@inlined
def _on_grid(a: float, b: float) -> float:
    """A product, rounded to the grid of exact sums; not to be reordered."""
    return a * b + TO_GRID - TO_GRID


@summing
def _inner(a: Float64Array, b: Float64Array) -> float:
    total = 0.0
    for i in range(len(a)):
        total += _on_grid(a[i], b[i])
    return total


@inlined
def _power_above(size: float) -> float:
    return size / math.frexp(size)[0] if size > 0 else 1.0


@compiled
def _bring_to_one(vector: Float64Array) -> None:
    top = 0.0
    for i in range(len(vector)):
        top = max(top, abs(vector[i]))
    n = len(vector)
    vector /= math.ldexp(_power_above(top), (math.frexp(float(n))[1] + 1) >> 1)
    for _ in range(1 if n < MEASURED_ONCE else 2):
        most = _inner(vector, vector) + n * HALF_GRID
        vector /= math.ldexp(1.0, (math.frexp(most)[1] + 1) >> 1)


@inlined
def _root(square: float) -> float:
    root = 0.75
    for _ in range(NEWTON_STEPS):
        root = (root + square / root) / 2
    return root


@compiled
def _reflect(v: Float64Array, gain: float, vector: Float64Array) -> None:
    weight = gain * _inner(v, vector)
    for i in range(len(v)):
        vector[i] -= weight * v[i]


@compiled
def _bend(v: Float64Array) -> float:
    """Makes of a row what others are reflected by; with which gain."""
    _bring_to_one(v)
    square, first = _inner(v, v), v[0]
    size = _root(square) if square != 0 else 0.0
    v[0] = first - size if first < 0 else first + size
    v /= 2
    return 4 / (size * (size + abs(first))) if size != 0 else 0.0


@allocating
def _orthonormalise(rows: Float32Array) -> None:
    r, n = rows.shape
    left = rows.astype(np.float64)
    if not np.isfinite(left).all():
        rows[:] = np.nan
        return
    gains = np.zeros(r)
    for j in range(r):
        _bring_to_one(left[j])
    for begin in range(0, r, PANEL):
        end = min(begin + PANEL, r)
        for i in range(begin, r):
            for j in range(begin, min(i, end)):
                _reflect(left[j, j:], gains[j], left[i, j:])
            if i < end:
                gains[i] = _bend(left[i, i:])
    axes = np.eye(r, n)
    for begin in range((r - 1) // PANEL * PANEL, -1, -PANEL):
        for i in range(begin, r):
            for j in range(min(i, begin + PANEL - 1), begin - 1, -1):
                _reflect(left[j, j:], gains[j], axes[i, j:])
    for i in range(r):
        copy(axes[i], rows[i])
