"""Products with thin factors, fused with the memory so that a step of power iteration is one pass over the gradient.

Nothing between gradient and residual is stored: ``t`` is formed anew, in registers, wherever it is needed. Factors are
taken four at a time, and so are rows. Sums may be taken in any order, so these agree with the reference up to rounding,
not bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from gradwire.deferred import Flag, flag
from gradwire.kernels.compensated import Compensated
from gradwire.kernels.cpu._compiled import Float32Array, array, reordering
from gradwire.kernels.cpu._fours import (
    FOUR,
    accumulate,
    add_again,
    all_finite,
    keep,
    keep_finite,
    keep_rest,
    keep_vector,
    load_four,
    places_of,
    plus_products,
    put_dots,
    splat_four,
)
from gradwire.kernels.cpu._source import Source, source_of
from gradwire.kernels.cpu._vectors import WIDTH, load, multiply_add, splat, store
from gradwire.kernels.parts import ranges, side_by_side
from gradwire.layout import Block

PANEL = 1 << 17
"""Elements that are projected on their columns and then, still in the cache, become the residual."""

NARROWEST_PANEL = 512
"""Columns of a panel, at least: less of a row is not worth its way from memory."""


def project_rows(block: Block, source: Compensated, q: Tensor, p: Tensor, subtract: Tensor | None) -> Flag:
    whole, rows, m = source_of(block, source), ranges(p.shape[1], block.numel, FOUR), q.shape[1]

    def take_back(taken: Float32Array, factors: Float32Array, begin: int, end: int) -> None:
        add_again(whole, factors, taken, begin, end, 0, m)

    return _project(_project_rows, take_back, whole, q, p, subtract, rows)


def project_columns(block: Block, source: Compensated, p: Tensor, q: Tensor, subtract: Tensor | None) -> Flag:
    whole, columns, n = source_of(block, source), ranges(q.shape[1], block.numel, WIDTH), p.shape[1]

    def take_back(taken: Float32Array, factors: Float32Array, begin: int, end: int) -> None:
        add_again(whole, taken, factors, 0, n, begin, end)

    return _project(_project_columns, take_back, whole, p, q, subtract, columns)


def write_product(block: Block, p: Tensor, q: Tensor, out: Tensor, residual: Tensor | None) -> None:
    given = source_of(block, Compensated(out, residual)), _in_fours(array(p), -0.0), _in_fours(array(q))
    side_by_side(lambda rows: _write_product(*given, *rows), ranges(p.shape[1], block.numel, FOUR))


def _project(
    kernel: Any,
    take_back: Callable[[Float32Array, Float32Array, int, int], None],
    source: Source,
    fixed: Tensor,
    computed: Tensor,
    subtract: Tensor | None,
    parts: list[tuple[int, int]],
) -> Flag:
    """Calls a projection with the block's one matrix, in parts, and takes back what it subtracted if one is not finite.

    Args:
        kernel: Computes a range of the factors, and returns where those that are finite end in it.
        take_back: Undoes what it did to the residual.
        source: The matrix.
        fixed: The factors that it is multiplied by.
        computed: What is computed.
        subtract: What is to be multiplied by what is computed, and subtracted.
        parts: The ranges.
    """
    result = array(computed)
    factors = _in_fours(result)
    first = _in_fours(array(fixed))
    taken = first if subtract is None else _in_fours(array(subtract))
    ends = side_by_side(lambda part: int(kernel(source, first, factors, taken, subtract is not None, *part)), parts)
    finite = all(found == end for found, (_, end) in zip(ends, parts, strict=True))
    if not finite:
        if source.keep and subtract is not None:
            side_by_side(
                lambda part: take_back(taken, factors, *part),
                [(begin, found) for found, (begin, _) in zip(ends, parts, strict=True)],
            )
        factors[:] = np.nan
    if factors is not result:
        result[:] = factors[: len(result)]
    return flag(finite)


def _in_fours(factors: Float32Array, zero: float = 0.0) -> Float32Array:
    """The factors, with as many zeros after them as make their number a multiple of ``FOUR``.

    The product of zeros of both signs changes no sum, not even one that is zero.
    """
    missing = -len(factors) % FOUR
    return np.concatenate((factors, np.full((missing, factors.shape[1]), zero, np.float32))) if missing else factors


@reordering
def _project_rows(
    source: Source,
    q: Float32Array,
    p: Float32Array,
    taken: Float32Array,
    subtract: bool,
    begin: int,
    stop: int,
) -> int:
    rank, m, start, keeps = len(p), q.shape[1], source.runs[0, 0], source.keep
    finite, found = True, stop
    for row in range(begin, stop, FOUR):
        end = min(row + FOUR, stop)
        for k in range(0, rank, FOUR):
            put_dots(source, q, p, k, row)
        if finite and not all_finite(p, row, end):
            finite, found = False, row
        if keeps and not finite:
            keep_finite(source, start + row * m, start + end * m)
        elif keeps and subtract:
            keep_rest(source, p, taken, row, np.int64(0), m)
        elif keeps:
            keep(source, start + row * m, start + end * m)
    return found


@reordering
def _project_columns(
    source: Source,
    p: Float32Array,
    q: Float32Array,
    taken: Float32Array,
    subtract: bool,
    begin: int,
    stop: int,
) -> int:
    (rank, n), m, start, keeps = p.shape, q.shape[1], source.runs[0, 0], source.keep
    width = max(PANEL // n, NARROWEST_PANEL)
    finite, found = True, stop
    for k in range(len(q)):
        q[k, begin:stop] = 0
    for low in range(begin, stop, width):
        high = min(low + width, stop)
        for row in range(0, n, FOUR):
            for k in range(0, rank, FOUR):
                accumulate(source, p, q, k, row, low, high)
        if finite and not all_finite(q, low, high):
            finite, found = False, low
        if keeps and finite and subtract:
            for row in range(0, n, FOUR):
                keep_rest(source, taken, q, row, low, high)
        elif keeps:
            for first in range(start, start + n * m, m):
                if finite:
                    keep(source, first + low, first + high)
                else:
                    keep_finite(source, first + low, first + high)
    return found


@reordering
def _write_product(source: Source, p: Float32Array, q: Float32Array, begin: int, end: int) -> None:
    """Its source's gradient is what is written, of some rows."""
    n, m, start, out, memory = p.shape[1], q.shape[1], source.runs[0, 0], source.gradient, source.residual
    whole = m // WIDTH * WIDTH
    zero, minus = splat(np.float32(0)), splat(np.float32(-1))
    for row in range(begin, end, FOUR):
        r0, r1, r2, r3 = places_of(start, row, n, m)
        for k in range(0, len(q), FOUR):
            w0, w1 = splat_four(p, k, row, np.float32(1)), splat_four(p, k, min(row + 1, n - 1), np.float32(1))
            w2 = splat_four(p, k, min(row + 2, n - 1), np.float32(1))
            w3 = splat_four(p, k, min(row + 3, n - 1), np.float32(1))
            for j in range(0, whole, WIDTH):
                factors = load_four(q, k, j)
                t0 = plus_products(w0, factors, load(out, r0 + j) if k else zero)
                t1 = plus_products(w1, factors, load(out, r1 + j) if k else zero)
                t2 = plus_products(w2, factors, load(out, r2 + j) if k else zero)
                t3 = plus_products(w3, factors, load(out, r3 + j) if k else zero)
                store(out, r0 + j, t0)
                store(out, r1 + j, t1)
                store(out, r2 + j, t2)
                store(out, r3 + j, t3)
        for i in range(row, min(row + FOUR, end)):
            first = start + i * m
            for j in range(whole, m):
                value = np.float32(0)
                for k in range(len(q)):
                    value = multiply_add(p[k, i], q[k, j], value)
                out[first + j] = value
            if source.keep:
                for j in range(0, whole, WIDTH):
                    rest = multiply_add(minus, load(out, first + j), load(memory, first + j))
                    keep_vector(memory, first + j, rest)
                for j in range(whole, m):
                    left = memory[first + j] - out[first + j]
                    if abs(left) < np.float32(np.inf):
                        memory[first + j] = left
