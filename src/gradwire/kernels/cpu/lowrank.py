"""Products with thin factors, fused with the memory so that a step of power iteration is one pass over the gradient.

Sums may be taken in any order, so these agree with the reference up to rounding, not bit for bit.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from torch import Tensor

from gradwire.kernels.cpu._compiled import (
    Float32Array,
    array,
    compensate,
    store_compensated,
    values_and_memory,
)
from gradwire.layout import Block

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
    subtract: bool,
) -> bool:
    """See :meth:`gradwire.kernels.Kernels.project_rows`."""
    values, memory, keeps = _matrices(block, gradient, residual, p, q)
    weights = np.float32(beta if keeps else 0), np.float32(gamma if keeps else 1)
    return bool(_project_rows(values, memory, keeps, *weights, array(q), array(p), subtract))


def project_columns(
    block: Block,
    gradient: Tensor,
    residual: Tensor | None,
    beta: float,
    gamma: float,
    p: Tensor,
    q: Tensor,
    subtract: bool,
) -> bool:
    """See :meth:`gradwire.kernels.Kernels.project_columns`."""
    values, memory, keeps = _matrices(block, gradient, residual, p, q)
    weights = np.float32(beta if keeps else 0), np.float32(gamma if keeps else 1)
    return bool(_project_columns(values, memory, keeps, *weights, array(p), array(q), subtract))


def write_product(block: Block, p: Tensor, q: Tensor, out: Tensor, residual: Tensor | None) -> None:
    """See :meth:`gradwire.kernels.Kernels.write_product`."""
    written, memory, keeps = _matrices(block, out, residual, p, q)
    _write_product(array(p), array(q), written, memory, keeps)


def _matrices(
    block: Block, gradient: Tensor, residual: Tensor | None, p: Tensor, q: Tensor
) -> tuple[Float32Array, Float32Array, bool]:
    """The block's one matrix in the gradient and in the residual, and whether there is a residual."""
    values, memory, keeps = values_and_memory(gradient, residual)
    n, m = p.shape[1], q.shape[1]
    start = int(block.runs[0, 0])
    whole = slice(start, start + n * m)
    return values[whole].reshape(n, m), memory[whole].reshape(n, m), keeps


@reordering
def _dot_pair(t: Float32Array, u: Float32Array, q: Float32Array, p: Float32Array, row: int) -> None:
    """``p[:, row] = q @ t`` and ``p[:, row + 1] = q @ u``, two factors at a time: each is loaded once for both rows."""
    rank, m = q.shape
    for k in range(0, rank - 1, 2):
        q0, q1 = q[k], q[k + 1]
        t0 = t1 = u0 = u1 = np.float32(0)
        for j in range(m):
            t0 += q0[j] * t[j]
            t1 += q1[j] * t[j]
            u0 += q0[j] * u[j]
            u1 += q1[j] * u[j]
        p[k, row], p[k + 1, row], p[k, row + 1], p[k + 1, row + 1] = t0, t1, u0, u1
    if rank % 2:
        q0 = q[rank - 1]
        t0 = u0 = np.float32(0)
        for j in range(m):
            t0 += q0[j] * t[j]
            u0 += q0[j] * u[j]
        p[rank - 1, row], p[rank - 1, row + 1] = t0, u0


@reordering
def _dot(t: Float32Array, q: Float32Array, p: Float32Array, row: int) -> None:
    """``p[:, row] = q @ t``."""
    for k in range(len(q)):
        factor = q[k]
        total = np.float32(0)
        for j in range(t.size):
            total += factor[j] * t[j]
        p[k, row] = total


@reordering
def _add_four(t: Float32Array, rows: Float32Array, first: int, weights: Float32Array) -> None:
    """``t += weights @ rows[first:first + 4]``, in one pass over ``t``."""
    a, b, c, d = rows[first], rows[first + 1], rows[first + 2], rows[first + 3]
    u, v, w, x = weights[0], weights[1], weights[2], weights[3]
    for j in range(t.size):
        t[j] += (u * a[j] + v * b[j]) + (w * c[j] + x * d[j])


@reordering
def _put_four(out: Float32Array, t: Float32Array, rows: Float32Array, weights: Float32Array) -> None:
    """``out = t + weights @ rows[:4]``, in one pass; ``out`` shares no memory with the others."""
    a, b, c, d = rows[0], rows[1], rows[2], rows[3]
    u, v, w, x = weights[0], weights[1], weights[2], weights[3]
    for j in range(out.size):
        out[j] = t[j] + ((u * a[j] + v * b[j]) + (w * c[j] + x * d[j]))


@reordering
def _put_product(
    out: Float32Array,
    t: Float32Array,
    p: Float32Array,
    row: int,
    q: Float32Array,
    sign: np.float32,
    weights: Float32Array,
) -> None:
    """``out = t + sign * p[:, row] @ q``; ``weights`` is scratch for four values."""
    rank = len(q)
    k = 0
    if rank < 4:
        for j in range(out.size):
            out[j] = t[j]
    while k + 4 <= rank:
        for i in range(4):
            weights[i] = sign * p[k + i, row]
        if k == 0:
            _put_four(out, t, q, weights)
        else:
            _add_four(out, q, k, weights)
        k += 4
    while k < rank:
        weight, factor = sign * p[k, row], q[k]
        for j in range(out.size):
            out[j] += weight * factor[j]
        k += 1


@reordering
def _all_finite(factor: Float32Array, column: int) -> bool:
    """Whether ``factor[:, column]`` is finite, and with it the row of ``t`` that it was computed from."""
    finite = True
    for k in range(len(factor)):
        finite = finite and np.isfinite(factor[k, column])
    return finite


@reordering
def _project_rows(
    values: Float32Array,
    memory: Float32Array,
    keeps: bool,
    beta: np.float32,
    gamma: np.float32,
    q: Float32Array,
    p: Float32Array,
    subtract: bool,
) -> bool:
    n, m = values.shape
    pair, weights = np.empty((2, m), np.float32), np.empty(4, np.float32)
    finite = True
    for row in range(0, n, 2):
        rows = min(2, n - row)
        for i in range(rows):
            compensate(values[row + i], memory[row + i], beta, gamma, pair[i])
        if rows == 2:
            _dot_pair(pair[0], pair[1], q, p, row)
        else:
            _dot(pair[0], q, p, row)
        for i in range(rows):
            if finite and not _all_finite(p, row + i):
                finite = False
                if keeps and subtract:
                    _take_back(memory, p, row + i, q, weights)
            if keeps and not finite:
                store_compensated(pair[i], memory[row + i])
            elif keeps and subtract:
                _put_product(memory[row + i], pair[i], p, row + i, q, np.float32(-1), weights)
            elif keeps:
                kept = memory[row + i]
                for j in range(m):
                    kept[j] = pair[i, j]
    if not finite:
        p[:] = np.nan
    return finite


@reordering
def _take_back(memory: Float32Array, p: Float32Array, rows: int, q: Float32Array, weights: Float32Array) -> None:
    """Adds again what was subtracted from the first rows."""
    t = np.empty(memory.shape[1], np.float32)
    for row in range(rows):
        t[:] = memory[row]
        _put_product(memory[row], t, p, row, q, np.float32(1), weights)


@reordering
def _project_columns(
    values: Float32Array,
    memory: Float32Array,
    keeps: bool,
    beta: np.float32,
    gamma: np.float32,
    p: Float32Array,
    q: Float32Array,
    subtract: bool,
) -> bool:
    n, m = values.shape
    four, weights = np.zeros((4, m), np.float32), np.empty(4, np.float32)
    finite = True
    q[:] = 0
    for row in range(0, n, 4):
        rows = min(4, n - row)
        for i in range(rows):
            compensate(values[row + i], memory[row + i], beta, gamma, four[i])
            if keeps:
                finite = store_compensated(four[i], memory[row + i]) and finite
        for k in range(len(q)):
            weights[:] = 0
            weights[:rows] = p[k, row : row + rows]
            _add_four(q[k], four, 0, weights)
    for column in range(m):
        finite = finite and _all_finite(q, column)
    if not finite:
        q[:] = np.nan
    elif keeps and subtract:
        for row in range(n):
            _subtract_product(memory[row], p, row, q, weights)
    return finite


@reordering
def _subtract_product(t: Float32Array, p: Float32Array, row: int, q: Float32Array, weights: Float32Array) -> None:
    """``t -= p[:, row] @ q``; ``weights`` is scratch for four values."""
    rank = len(q)
    k = 0
    while k + 4 <= rank:
        for i in range(4):
            weights[i] = -p[k + i, row]
        _add_four(t, q, k, weights)
        k += 4
    while k < rank:
        weight, factor = p[k, row], q[k]
        for j in range(t.size):
            t[j] -= weight * factor[j]
        k += 1


@reordering
def _write_product(p: Float32Array, q: Float32Array, out: Float32Array, memory: Float32Array, keeps: bool) -> None:
    nothing, weights = np.zeros(q.shape[1], np.float32), np.empty(4, np.float32)
    for row in range(len(out)):
        written = out[row]
        _put_product(written, nothing, p, row, q, np.float32(1), weights)
        if keeps:
            left = memory[row]
            for j in range(left.size):
                left[j] -= written[j]
