"""Four rows of a matrix with four factors at a time, in registers; what a pass over thin products is made of."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradwire.kernels.cpu._compiled import Float32Array, reordering
from gradwire.kernels.cpu._source import Source
from gradwire.kernels.cpu._vectors import WIDTH, load, multiply_add, splat, store, sum_of_vector, where_finite

FOUR = 4
"""Rows of the matrix, and factors, that a pass handles; a rank that is no multiple is filled up with zeros."""

Vector = Any
"""What compiled functions hold of ``WIDTH`` values."""

Vectors = tuple[Vector, Vector, Vector, Vector]
Places = tuple[int, int, int, int]


@reordering
def places_of(start: int, row: int, n: int, m: int) -> Places:
    """Where four rows begin; beyond the last row it is again the last one."""
    last = n - 1
    return (
        start + row * m,
        start + min(row + 1, last) * m,
        start + min(row + 2, last) * m,
        start + min(row + 3, last) * m,
    )


@reordering
def load_four(factors: Float32Array, k: int, column: int) -> Vectors:
    """``factors[k:k + 4, column:column + WIDTH]``."""
    size = factors.shape[1]
    first = k * size + column
    return (
        load(factors, first),
        load(factors, first + size),
        load(factors, first + 2 * size),
        load(factors, first + 3 * size),
    )


@reordering
def splat_four(factors: Float32Array, k: int, column: int, sign: np.float32) -> Vectors:
    """``sign * factors[k:k + 4, column]``, each in all lanes."""
    return (
        splat(sign * factors[k, column]),
        splat(sign * factors[k + 1, column]),
        splat(sign * factors[k + 2, column]),
        splat(sign * factors[k + 3, column]),
    )


@reordering
def _splat_row(factors: Float32Array, k: int, first: int) -> Vectors:
    """``factors[k, first:first + 4]``, each in all lanes; zero beyond the end."""
    size, zero = factors.shape[1], np.float32(0)
    return (
        splat(factors[k, first]),
        splat(factors[k, first + 1] if first + 1 < size else zero),
        splat(factors[k, first + 2] if first + 2 < size else zero),
        splat(factors[k, first + 3] if first + 3 < size else zero),
    )


@reordering
def _compensated(values: Float32Array, memory: Float32Array, betas: Vector, gammas: Vector, place: int) -> Vector:
    """``t`` from a place on."""
    product = multiply_add(gammas, load(values, place), splat(np.float32(0)))
    return multiply_add(betas, load(memory, place), product)


@reordering
def plus_products(weights: Vectors, vectors: Vectors, term: Vector) -> Vector:
    """``term`` and the sum of four products."""
    term = multiply_add(weights[0], vectors[0], term)
    term = multiply_add(weights[1], vectors[1], term)
    term = multiply_add(weights[2], vectors[2], term)
    return multiply_add(weights[3], vectors[3], term)


@reordering
def _plus_multiples(factor: Vector, vectors: Vectors, terms: Vectors) -> Vectors:
    """``terms + factor * vectors``."""
    return (
        multiply_add(factor, vectors[0], terms[0]),
        multiply_add(factor, vectors[1], terms[1]),
        multiply_add(factor, vectors[2], terms[2]),
        multiply_add(factor, vectors[3], terms[3]),
    )


@reordering
def _put_sums(p: Float32Array, k: int, column: int, sums: Vectors) -> None:
    """``p[k:k + 4, column] = sums``, if there is that column."""
    if column < p.shape[1]:
        p[k, column], p[k + 1, column] = sum_of_vector(sums[0]), sum_of_vector(sums[1])
        p[k + 2, column], p[k + 3, column] = sum_of_vector(sums[2]), sum_of_vector(sums[3])


@reordering
def put_dots(
    source: Source,
    q: Float32Array,
    p: Float32Array,
    k: int,
    row: int,
) -> None:
    """``p[k:k + 4, row:row + 4] = q[k:k + 4] @ t.T``."""
    _, _, values, memory, _, beta, gamma = source
    start = source.runs[0, 0]
    n, m = p.shape[1], q.shape[1]
    whole = m // WIDTH * WIDTH
    betas, gammas, zero = splat(beta), splat(gamma), splat(np.float32(0))
    r0, r1, r2, r3 = places_of(start, row, n, m)
    s0 = s1 = s2 = s3 = (zero, zero, zero, zero)
    for j in range(0, whole, WIDTH):
        factors = load_four(q, k, j)
        s0 = _plus_multiples(_compensated(values, memory, betas, gammas, r0 + j), factors, s0)
        s1 = _plus_multiples(_compensated(values, memory, betas, gammas, r1 + j), factors, s1)
        s2 = _plus_multiples(_compensated(values, memory, betas, gammas, r2 + j), factors, s2)
        s3 = _plus_multiples(_compensated(values, memory, betas, gammas, r3 + j), factors, s3)
    _put_sums(p, k, row, s0)
    _put_sums(p, k, row + 1, s1)
    _put_sums(p, k, row + 2, s2)
    _put_sums(p, k, row + 3, s3)
    for j in range(whole, m):
        for i in range(row, min(row + FOUR, n)):
            t = beta * memory[start + i * m + j] + gamma * values[start + i * m + j]
            for factor in range(k, k + FOUR):
                p[factor, i] += q[factor, j] * t


@reordering
def accumulate(
    source: Source,
    p: Float32Array,
    q: Float32Array,
    k: int,
    row: int,
    low: int,
    high: int,
) -> None:
    """``q[k:k + 4] += p[k:k + 4, row:row + 4] @ t`` between two columns."""
    _, _, values, memory, _, beta, gamma = source
    start = source.runs[0, 0]
    n, m = p.shape[1], q.shape[1]
    whole = low + (high - low) // WIDTH * WIDTH
    betas, gammas = splat(beta), splat(gamma)
    r0, r1, r2, r3 = places_of(start, row, n, m)
    w0, w1 = _splat_row(p, k, row), _splat_row(p, k + 1, row)
    w2, w3 = _splat_row(p, k + 2, row), _splat_row(p, k + 3, row)
    for j in range(low, whole, WIDTH):
        t = (
            _compensated(values, memory, betas, gammas, r0 + j),
            _compensated(values, memory, betas, gammas, r1 + j),
            _compensated(values, memory, betas, gammas, r2 + j),
            _compensated(values, memory, betas, gammas, r3 + j),
        )
        place = k * m + j
        store(q, place, plus_products(w0, t, load(q, place)))
        store(q, place + m, plus_products(w1, t, load(q, place + m)))
        store(q, place + 2 * m, plus_products(w2, t, load(q, place + 2 * m)))
        store(q, place + 3 * m, plus_products(w3, t, load(q, place + 3 * m)))
    for j in range(whole, high):
        for i in range(row, min(row + FOUR, n)):
            u = beta * memory[start + i * m + j] + gamma * values[start + i * m + j]
            for factor in range(k, k + FOUR):
                q[factor, j] += p[factor, i] * u


@reordering
def all_finite(factors: Float32Array, low: int, high: int) -> bool:
    """Whether factors are finite between two columns, and with them ``t``."""
    zeros = np.float32(0)
    for k in range(len(factors)):
        for i in range(low, high):
            zeros += np.float32(0) * factors[k, i]
    return bool(zeros == 0)


@reordering
def keep_rest(
    source: Source,
    p: Float32Array,
    q: Float32Array,
    row: int,
    low: int,
    high: int,
) -> None:
    """``residual = t - p.T @ q`` for four rows, between two columns, where finite."""
    _, _, values, memory, _, beta, gamma = source
    start = source.runs[0, 0]
    n, m = p.shape[1], q.shape[1]
    whole = low + (high - low) // WIDTH * WIDTH
    r0, r1, r2, r3 = places_of(start, row, n, m)
    for k in range(0, len(q), FOUR):
        betas, gammas = splat(beta if k == 0 else np.float32(1)), splat(gamma if k == 0 else np.float32(0))
        w0, w1 = splat_four(p, k, row, np.float32(-1)), splat_four(p, k, min(row + 1, n - 1), np.float32(-1))
        w2 = splat_four(p, k, min(row + 2, n - 1), np.float32(-1))
        w3 = splat_four(p, k, min(row + 3, n - 1), np.float32(-1))
        for j in range(low, whole, WIDTH):
            factors = load_four(q, k, j)
            t0 = _compensated(values, memory, betas, gammas, r0 + j)
            t1 = _compensated(values, memory, betas, gammas, r1 + j)
            t2 = _compensated(values, memory, betas, gammas, r2 + j)
            t3 = _compensated(values, memory, betas, gammas, r3 + j)
            keep_vector(memory, r0 + j, plus_products(w0, factors, t0))
            keep_vector(memory, r1 + j, plus_products(w1, factors, t1))
            keep_vector(memory, r2 + j, plus_products(w2, factors, t2))
            keep_vector(memory, r3 + j, plus_products(w3, factors, t3))
    for j in range(whole, high):
        for i in range(row, min(row + FOUR, n)):
            rest = beta * memory[start + i * m + j] + gamma * values[start + i * m + j]
            for k in range(len(q)):
                rest -= p[k, i] * q[k, j]
            if abs(rest) < np.float32(np.inf):
                memory[start + i * m + j] = rest


@reordering
def keep_vector(memory: Float32Array, place: int, rest: Vector) -> None:
    """``residual = rest`` from a place on, where finite."""
    store(memory, place, where_finite(rest, load(memory, place)))


@reordering
def keep(source: Source, first: int, last: int) -> None:
    """``residual = t`` between two elements."""
    _, _, values, memory, _, beta, gamma = source
    whole = first + (last - first) // WIDTH * WIDTH
    betas, gammas = splat(beta), splat(gamma)
    for i in range(first, whole, WIDTH):
        store(memory, i, _compensated(values, memory, betas, gammas, i))
    for i in range(whole, last):
        memory[i] = beta * memory[i] + gamma * values[i]


@reordering
def keep_finite(source: Source, first: int, last: int) -> None:
    """``residual = t`` between two elements, where finite."""
    _, _, values, memory, _, beta, gamma = source
    for i in range(first, last):
        t = beta * memory[i] + gamma * values[i]
        if abs(t) < np.float32(np.inf):
            memory[i] = t


@reordering
def add_again(
    source: Source, p: Float32Array, q: Float32Array, first_row: int, end_row: int, low: int, high: int
) -> None:
    """Adds again what was subtracted from some rows, between two columns, where finite."""
    m, start, memory = q.shape[1], source.runs[0, 0], source.residual
    for row in range(first_row, end_row):
        for k in range(len(q)):
            for j in range(low, high):
                t = memory[start + row * m + j] + p[k, row] * q[k, j]
                if abs(t) < np.float32(np.inf):
                    memory[start + row * m + j] = t
