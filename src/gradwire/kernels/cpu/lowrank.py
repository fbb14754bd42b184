"""Products with thin factors, fused with the memory so that a step of power iteration is one pass over the gradient.

Nothing between gradient and residual is stored: ``t`` is formed anew, in registers, wherever it is needed. Factors are
taken four at a time, and so are rows. Sums may be taken in any order, so these agree with the reference up to rounding,
not bit for bit.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from torch import Tensor

from gradwire.deferred import Flag, flag
from gradwire.kernels.cpu._compiled import Float32Array, array, values_and_memory
from gradwire.kernels.cpu._vectors import WIDTH, load, multiply_add, splat, store, sum_of_vector, where_finite
from gradwire.layout import Block

FOUR = 4
"""Rows of the matrix, and factors, that a pass handles; a rank that is no multiple is filled up with zeros."""

PANEL = 1 << 17
"""Elements that are projected on their columns and then, still in the cache, become the residual."""

NARROWEST_PANEL = 512
"""Columns of a panel, at least: less of a row is not worth its way from memory."""

Vector = Any
"""What compiled functions hold of ``WIDTH`` values."""

Vectors = tuple[Vector, Vector, Vector, Vector]
Places = tuple[int, int, int, int]

reordering: Any = numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})
"""Compiles a function whose sums may be reordered and whose products may be fused with them."""


def project_rows(
    block: Block,
    gradient: Tensor,
    residual: Tensor | None,
    beta: float,
    gamma: float,
    q: Tensor,
    p: Tensor,
    subtract: Tensor | None,
) -> Flag:
    return _project(_project_rows, block, gradient, residual, beta, gamma, q, p, subtract)


def project_columns(
    block: Block,
    gradient: Tensor,
    residual: Tensor | None,
    beta: float,
    gamma: float,
    p: Tensor,
    q: Tensor,
    subtract: Tensor | None,
) -> Flag:
    return _project(_project_columns, block, gradient, residual, beta, gamma, p, q, subtract)


def write_product(block: Block, p: Tensor, q: Tensor, out: Tensor, residual: Tensor | None) -> None:
    written, memory, keeps = values_and_memory(out, residual)
    _write_product(int(block.runs[0, 0]), _in_fours(array(p), -0.0), _in_fours(array(q)), written, memory, keeps)


def _project(
    kernel: Any,
    block: Block,
    gradient: Tensor,
    residual: Tensor | None,
    beta: float,
    gamma: float,
    fixed: Tensor,
    computed: Tensor,
    subtract: Tensor | None,
) -> Flag:
    """Calls a projection with the block's one matrix."""
    values, memory, keeps = values_and_memory(gradient, residual)
    weights = np.float32(beta if keeps else 0), np.float32(gamma if keeps else 1)
    result = array(computed)
    factors = _in_fours(result)
    first = _in_fours(array(fixed))
    taken = first if subtract is None else _in_fours(array(subtract))
    start, subtracts = int(block.runs[0, 0]), subtract is not None
    finite = kernel(start, values, memory, keeps, *weights, first, factors, taken, subtracts)
    if factors is not result:
        result[:] = factors[: len(result)]
    return flag(bool(finite))


def _in_fours(factors: Float32Array, zero: float = 0.0) -> Float32Array:
    """The factors, with as many zeros after them as make their number a multiple of ``FOUR``.

    The product of zeros of both signs changes no sum, not even one that is zero.
    """
    missing = -len(factors) % FOUR
    return np.concatenate((factors, np.full((missing, factors.shape[1]), zero, np.float32))) if missing else factors


@reordering
def _project_rows(
    start: int,
    values: Float32Array,
    memory: Float32Array,
    keeps: bool,
    beta: np.float32,
    gamma: np.float32,
    q: Float32Array,
    p: Float32Array,
    taken: Float32Array,
    subtract: bool,
) -> bool:
    (rank, n), m = p.shape, q.shape[1]
    finite = True
    for row in range(0, n, FOUR):
        end = min(row + FOUR, n)
        for k in range(0, rank, FOUR):
            _dot(start, values, memory, beta, gamma, q, p, k, row)
        if finite and not _all_finite(p, row, end):
            finite = False
            if keeps and subtract:
                _take_back(start, memory, p, taken, row, m)
        if keeps and not finite:
            _keep_finite(values, memory, beta, gamma, start + row * m, start + end * m)
        elif keeps and subtract:
            _keep_rest(start, values, memory, beta, gamma, p, taken, row, np.int64(0), m)
        elif keeps:
            _keep(values, memory, beta, gamma, start + row * m, start + end * m)
    if not finite:
        p[:] = np.nan
    return finite


@reordering
def _project_columns(
    start: int,
    values: Float32Array,
    memory: Float32Array,
    keeps: bool,
    beta: np.float32,
    gamma: np.float32,
    p: Float32Array,
    q: Float32Array,
    taken: Float32Array,
    subtract: bool,
) -> bool:
    (rank, n), m = p.shape, q.shape[1]
    width = max(PANEL // n, NARROWEST_PANEL)
    finite = True
    q[:] = 0
    for low in range(0, m, width):
        high = min(low + width, m)
        for row in range(0, n, FOUR):
            for k in range(0, rank, FOUR):
                _accumulate(start, values, memory, beta, gamma, p, q, k, row, low, high)
        if finite and not _all_finite(q, low, high):
            finite = False
            if keeps and subtract:
                _take_back(start, memory, taken, q, n, low)
        if keeps and finite and subtract:
            for row in range(0, n, FOUR):
                _keep_rest(start, values, memory, beta, gamma, taken, q, row, low, high)
        elif keeps:
            for first in range(start, start + n * m, m):
                if finite:
                    _keep(values, memory, beta, gamma, first + low, first + high)
                else:
                    _keep_finite(values, memory, beta, gamma, first + low, first + high)
    if not finite:
        q[:] = np.nan
    return finite


@reordering
def _places(start: int, row: int, n: int, m: int) -> Places:
    """Where four rows begin; beyond the last row it is again the last one."""
    last = n - 1
    return (
        start + row * m,
        start + min(row + 1, last) * m,
        start + min(row + 2, last) * m,
        start + min(row + 3, last) * m,
    )


@reordering
def _load_four(factors: Float32Array, k: int, column: int) -> Vectors:
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
def _splat_four(factors: Float32Array, k: int, column: int, sign: np.float32) -> Vectors:
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
def _plus_products(weights: Vectors, vectors: Vectors, term: Vector) -> Vector:
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
def _dot(
    start: int,
    values: Float32Array,
    memory: Float32Array,
    beta: np.float32,
    gamma: np.float32,
    q: Float32Array,
    p: Float32Array,
    k: int,
    row: int,
) -> None:
    """``p[k:k + 4, row:row + 4] = q[k:k + 4] @ t.T``."""
    n, m = p.shape[1], q.shape[1]
    whole = m // WIDTH * WIDTH
    betas, gammas, zero = splat(beta), splat(gamma), splat(np.float32(0))
    r0, r1, r2, r3 = _places(start, row, n, m)
    s0 = s1 = s2 = s3 = (zero, zero, zero, zero)
    for j in range(0, whole, WIDTH):
        factors = _load_four(q, k, j)
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
def _accumulate(
    start: int,
    values: Float32Array,
    memory: Float32Array,
    beta: np.float32,
    gamma: np.float32,
    p: Float32Array,
    q: Float32Array,
    k: int,
    row: int,
    low: int,
    high: int,
) -> None:
    """``q[k:k + 4] += p[k:k + 4, row:row + 4] @ t`` between two columns."""
    n, m = p.shape[1], q.shape[1]
    whole = low + (high - low) // WIDTH * WIDTH
    betas, gammas = splat(beta), splat(gamma)
    r0, r1, r2, r3 = _places(start, row, n, m)
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
        store(q, place, _plus_products(w0, t, load(q, place)))
        store(q, place + m, _plus_products(w1, t, load(q, place + m)))
        store(q, place + 2 * m, _plus_products(w2, t, load(q, place + 2 * m)))
        store(q, place + 3 * m, _plus_products(w3, t, load(q, place + 3 * m)))
    for j in range(whole, high):
        for i in range(row, min(row + FOUR, n)):
            u = beta * memory[start + i * m + j] + gamma * values[start + i * m + j]
            for factor in range(k, k + FOUR):
                q[factor, j] += p[factor, i] * u


@reordering
def _all_finite(factors: Float32Array, low: int, high: int) -> bool:
    """Whether factors are finite between two columns, and with them ``t``."""
    zeros = np.float32(0)
    for k in range(len(factors)):
        for i in range(low, high):
            zeros += np.float32(0) * factors[k, i]
    return bool(zeros == 0)


@reordering
def _keep_rest(
    start: int,
    values: Float32Array,
    memory: Float32Array,
    beta: np.float32,
    gamma: np.float32,
    p: Float32Array,
    q: Float32Array,
    row: int,
    low: int,
    high: int,
) -> None:
    """``residual = t - p.T @ q`` for four rows, between two columns, where finite."""
    n, m = p.shape[1], q.shape[1]
    whole = low + (high - low) // WIDTH * WIDTH
    r0, r1, r2, r3 = _places(start, row, n, m)
    for k in range(0, len(q), FOUR):
        betas, gammas = splat(beta if k == 0 else np.float32(1)), splat(gamma if k == 0 else np.float32(0))
        w0, w1 = _splat_four(p, k, row, np.float32(-1)), _splat_four(p, k, min(row + 1, n - 1), np.float32(-1))
        w2 = _splat_four(p, k, min(row + 2, n - 1), np.float32(-1))
        w3 = _splat_four(p, k, min(row + 3, n - 1), np.float32(-1))
        for j in range(low, whole, WIDTH):
            factors = _load_four(q, k, j)
            t0 = _compensated(values, memory, betas, gammas, r0 + j)
            t1 = _compensated(values, memory, betas, gammas, r1 + j)
            t2 = _compensated(values, memory, betas, gammas, r2 + j)
            t3 = _compensated(values, memory, betas, gammas, r3 + j)
            _keep_vector(memory, r0 + j, _plus_products(w0, factors, t0))
            _keep_vector(memory, r1 + j, _plus_products(w1, factors, t1))
            _keep_vector(memory, r2 + j, _plus_products(w2, factors, t2))
            _keep_vector(memory, r3 + j, _plus_products(w3, factors, t3))
    for j in range(whole, high):
        for i in range(row, min(row + FOUR, n)):
            rest = beta * memory[start + i * m + j] + gamma * values[start + i * m + j]
            for k in range(len(q)):
                rest -= p[k, i] * q[k, j]
            if abs(rest) < np.float32(np.inf):
                memory[start + i * m + j] = rest


@reordering
def _keep_vector(memory: Float32Array, place: int, rest: Vector) -> None:
    """``residual = rest`` from a place on, where finite."""
    store(memory, place, where_finite(rest, load(memory, place)))


@reordering
def _keep(
    values: Float32Array, memory: Float32Array, beta: np.float32, gamma: np.float32, first: int, last: int
) -> None:
    """``residual = t`` between two elements."""
    whole = first + (last - first) // WIDTH * WIDTH
    betas, gammas = splat(beta), splat(gamma)
    for i in range(first, whole, WIDTH):
        store(memory, i, _compensated(values, memory, betas, gammas, i))
    for i in range(whole, last):
        memory[i] = beta * memory[i] + gamma * values[i]


@reordering
def _keep_finite(
    values: Float32Array, memory: Float32Array, beta: np.float32, gamma: np.float32, first: int, last: int
) -> None:
    """``residual = t`` between two elements, where finite."""
    for i in range(first, last):
        t = beta * memory[i] + gamma * values[i]
        if abs(t) < np.float32(np.inf):
            memory[i] = t


@reordering
def _take_back(start: int, memory: Float32Array, p: Float32Array, q: Float32Array, rows: int, columns: int) -> None:
    """Adds again what was subtracted from the first rows and columns, where finite."""
    m = q.shape[1]
    for row in range(rows):
        for k in range(len(q)):
            for j in range(columns):
                t = memory[start + row * m + j] + p[k, row] * q[k, j]
                if abs(t) < np.float32(np.inf):
                    memory[start + row * m + j] = t


@reordering
def _write_product(
    start: int, p: Float32Array, q: Float32Array, out: Float32Array, memory: Float32Array, keeps: bool
) -> None:
    n, m = p.shape[1], q.shape[1]
    whole = m // WIDTH * WIDTH
    zero, minus = splat(np.float32(0)), splat(np.float32(-1))
    for row in range(0, n, FOUR):
        r0, r1, r2, r3 = _places(start, row, n, m)
        for k in range(0, len(q), FOUR):
            w0, w1 = _splat_four(p, k, row, np.float32(1)), _splat_four(p, k, min(row + 1, n - 1), np.float32(1))
            w2 = _splat_four(p, k, min(row + 2, n - 1), np.float32(1))
            w3 = _splat_four(p, k, min(row + 3, n - 1), np.float32(1))
            for j in range(0, whole, WIDTH):
                factors = _load_four(q, k, j)
                t0 = _plus_products(w0, factors, load(out, r0 + j) if k else zero)
                t1 = _plus_products(w1, factors, load(out, r1 + j) if k else zero)
                t2 = _plus_products(w2, factors, load(out, r2 + j) if k else zero)
                t3 = _plus_products(w3, factors, load(out, r3 + j) if k else zero)
                store(out, r0 + j, t0)
                store(out, r1 + j, t1)
                store(out, r2 + j, t2)
                store(out, r3 + j, t3)
        for i in range(row, min(row + FOUR, n)):
            first = start + i * m
            for j in range(whole, m):
                value = np.float32(0)
                for k in range(len(q)):
                    value = multiply_add(p[k, i], q[k, j], value)
                out[first + j] = value
            if keeps:
                for j in range(0, whole, WIDTH):
                    rest = multiply_add(minus, load(out, first + j), load(memory, first + j))
                    _keep_vector(memory, first + j, rest)
                for j in range(whole, m):
                    left = memory[first + j] - out[first + j]
                    if abs(left) < np.float32(np.inf):
                        memory[first + j] = left
