"""Products with thin factors: projections by cuBLAS, what becomes of them in one pass of our own.

A product's sums have one order, so its bits are the same on any GPU; those of projections are each worker's own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.deferred import Flag
from gradwire.kernels.compensated import Compensated
from gradwire.kernels.gpu._jitted import INFINITE, INFINITY
from gradwire.kernels.gpu._launch import jitted, launch
from gradwire.kernels.gpu.memory import leave_all
from gradwire.layout import Block

HEIGHT, WIDTH = 4, 256
"""Rows and columns of a program's tile: a row of a factor is read once for several rows of the product."""


def project_rows(block: Block, source: Compensated, q: Tensor, p: Tensor, subtract: Tensor | None) -> Flag:
    t, finite = _compensated(block, source)
    p.copy_(q @ t.view(p.shape[1], q.shape[1]).mT)
    return _mark(block, source.residual, p, subtract, p, finite)


def project_columns(block: Block, source: Compensated, p: Tensor, q: Tensor, subtract: Tensor | None) -> Flag:
    t, finite = _compensated(block, source)
    q.copy_(p @ t.view(p.shape[1], q.shape[1]))
    return _mark(block, source.residual, subtract, q, q, finite)


def write_product(block: Block, p: Tensor, q: Tensor, out: Tensor, residual: Tensor | None) -> None:
    _product(block, p, q, out, residual)


def _compensated(block: Block, source: Compensated) -> tuple[Tensor, Flag | None]:
    """``t``, which is left in the residual where it is finite, and whether all of it is; None where nobody looked."""
    gradient, residual, beta, gamma = source
    start, length, _ = block.runs[0].tolist()
    if residual is None:
        return gradient[start : start + length], None
    finite = leave_all(block, gradient, residual, beta, gamma).lt(INFINITE.value)
    return residual[start : start + length], finite


def _mark(
    block: Block, residual: Tensor | None, p: Tensor | None, q: Tensor | None, computed: Tensor, finite: Flag | None
) -> Flag:
    """Makes the computed factor NaN if it or ``t`` is not finite, so that its product is, which no residual keeps.

    Their product is taken from the residual if there are both factors.
    """
    whole = computed.isfinite().all()
    whole = whole if finite is None else whole & finite
    computed.masked_fill_(~whole, torch.nan)
    if p is not None and q is not None and residual is not None:
        _product(block, p, q, None, residual)
    return whole


def _product(block: Block, p: Tensor, q: Tensor, out: Tensor | None, residual: Tensor | None) -> None:
    start, _, _ = block.runs[0].tolist()
    (rank, n), m = p.shape, q.shape[1]
    p, q = p.contiguous(), q.contiguous()
    columns = triton.cdiv(m, WIDTH)
    launch(
        _write,
        triton.cdiv(n, HEIGHT) * columns,
        p,
        q,
        p if out is None else out[start:],
        p if residual is None else residual[start:],
        rank,
        n,
        m,
        columns,
        STORE=out is not None,
        KEEP=residual is not None,
        HEIGHT=HEIGHT,
        WIDTH=WIDTH,
    )


@jitted("out", "residual", "rank", "n", "m", "columns")
def _write(
    p,
    q,
    out,
    residual,
    rank,
    n,
    m,
    columns,
    STORE: tl.constexpr,
    KEEP: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """``out = p.T @ q``, and takes it from the residual where what is left is finite."""
    program = tl.program_id(0)
    i = (program // columns) * HEIGHT + tl.arange(0, HEIGHT)
    j = (program % columns) * WIDTH + tl.arange(0, WIDTH)
    rows, cols = i < n, j < m
    total = tl.load(p + i, mask=rows, other=0.0)[:, None] * tl.load(q + j, mask=cols, other=0.0)[None, :]
    for k in range(1, rank):
        of_row = tl.load(p + k * n + i, mask=rows, other=0.0)
        of_column = tl.load(q + k * m + j, mask=cols, other=0.0)
        total += of_row[:, None] * of_column[None, :]
    at = i.to(tl.int64)[:, None] * m + j[None, :]
    mask = rows[:, None] & cols[None, :]
    if STORE:
        tl.store(out + at, total, mask=mask)
    if KEEP:
        r = tl.load(residual + at, mask=mask, other=0.0)
        left = r - total
        tl.store(residual + at, tl.where(tl.abs(left) < INFINITY, left, r), mask=mask)
