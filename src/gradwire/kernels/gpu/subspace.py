"""Rows of a matrix as coordinates in a few directions and what is left, and back."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.compensated import Compensated
from gradwire.kernels.gpu._jitted import LANES, compensated, sum_of_lanes
from gradwire.kernels.gpu._launch import jitted, launch
from gradwire.kernels.reference import subspace
from gradwire.layout import Block

_WIDTH = 256
_WARP, _TOGETHER, _AHEAD = 32, 4, 64
"""Columns of a warp, combinations that a program makes at most, and rows that are read before they are added."""

_LARGEST_COORDINATE = tl.constexpr(subspace.LARGEST_COORDINATE)


def split_rows(block: Block, source: Compensated, basis: Tensor, coordinates: Tensor, out: Tensor) -> None:
    (gradient, residual, beta, gamma), (rank, n), m = source, coordinates.shape, basis.shape[1]
    start, keeps = int(block.runs[0, 0]), residual is not None
    rows = (gradient[start:], (gradient if residual is None else residual)[start:], beta, gamma)
    launch(_project, rank * n, *rows, basis, coordinates, n, m, KEEP=keeps, warps=1)
    _add(rows, keeps, coordinates, basis, -1.0, out[start:])


def add_product(block: Block, p: Tensor, q: Tensor, values: Tensor, out: Tensor) -> None:
    start = int(block.runs[0, 0])
    _add((values[start:], values[start:], 1.0, 1.0), False, p, q, 1.0, out[start:])


def combine_rows(block: Block, weights: Tensor, values: Tensor, out: Tensor) -> None:
    (rank, n), m, start = weights.shape, out.shape[1], int(block.runs[0, 0])
    columns = triton.cdiv(m, _WARP)
    arguments = (weights, values[start:], out, n, m, columns, rank)
    shape = {"HEIGHT": _TOGETHER, "WIDTH": _WARP, "AHEAD": _AHEAD, "warps": _TOGETHER}
    launch(_combine, triton.cdiv(rank, _TOGETHER) * columns, *arguments, **shape)


def _add(
    rows: tuple[Tensor, Tensor, float, float], keeps: bool, p: Tensor, q: Tensor, sign: float, out: Tensor
) -> None:
    (rank, n), m = p.shape, q.shape[1]
    columns = triton.cdiv(m, _WIDTH)
    arguments = (*rows, p, q, sign, out, rank, n, m, columns)
    launch(_add_multiples, n * columns, *arguments, KEEP=keeps, WIDTH=_WIDTH, warps=2)


@jitted("gradient", "residual", "beta", "gamma", "basis", "coordinates", "n", "m")
def _project(gradient, residual, beta, gamma, basis, coordinates, n, m, KEEP: tl.constexpr):
    """A product of a row and a direction: element ``j`` is added in lane ``j % LANES``, in order."""
    k = tl.program_id(0) // n
    first = (tl.program_id(0) % n).to(tl.int64) * m
    lane = tl.arange(0, LANES)
    total = tl.zeros((LANES,), tl.float64)
    for row in tl.range(0, m, LANES, loop_unroll_factor=8):
        j = row + lane
        t, _ = compensated(gradient, residual, first + j, j < m, beta, gamma, KEEP)
        total += t.to(tl.float64) * tl.load(basis + k.to(tl.int64) * m + j, mask=j < m, other=0.0).to(tl.float64)
    exact = sum_of_lanes(total)
    exact = tl.where(tl.abs(exact) < _LARGEST_COORDINATE, exact, 0.0)
    tl.store(coordinates + tl.program_id(0) + tl.arange(0, 1), exact.to(tl.float32))


@jitted("gradient", "residual", "beta", "gamma", "p", "q", "sign", "out", "rank", "n", "m", "columns")
def _add_multiples(
    gradient, residual, beta, gamma, p, q, sign, out, rank, n, m, columns, KEEP: tl.constexpr, WIDTH: tl.constexpr
):
    i = tl.program_id(0) // columns
    j = (tl.program_id(0) % columns) * WIDTH + tl.arange(0, WIDTH)
    mask, at = j < m, i.to(tl.int64) * m + j
    total, _ = compensated(gradient, residual, at, mask, beta, gamma, KEEP)
    for k in range(rank):
        row = tl.load(q + tl.cast(k, tl.int64) * m + j, mask=mask, other=0.0)
        total += tl.load(p + tl.cast(k, tl.int64) * n + i) * sign * row
    tl.store(out + at, total, mask=mask)


@jitted("weights", "values", "n", "m", "columns", "rank")
def _combine(weights, values, out, n, m, columns, rank, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, AHEAD: tl.constexpr):
    """A warp a combination: what they share they read together. The rows ahead are read before they are wanted."""
    wide = tl.cast(n, tl.int64)
    lane = tl.arange(0, HEIGHT * WIDTH)
    k = (tl.program_id(0) // columns) * HEIGHT + lane // WIDTH
    j = (tl.program_id(0) % columns) * WIDTH + lane % WIDTH
    mask = (k < rank) & (j < m)
    own = weights + k * wide
    total = tl.zeros((HEIGHT * WIDTH,), tl.float32)
    for first in range(0, n, AHEAD):
        factors = ()
        rows = ()
        for ahead in tl.static_range(AHEAD):
            i = first + ahead
            there = mask & (tl.zeros_like(k) + i < n)
            factors += (tl.load(own + i, mask=there, other=0.0),)  # type: ignore[assignment]
            rows += (tl.load(values + tl.cast(i, tl.int64) * m + j, mask=there, other=0.0),)  # type: ignore[assignment]
        for ahead in tl.static_range(AHEAD):
            total += tl.where(factors[ahead] != 0, factors[ahead] * rows[ahead], 0.0)
    tl.store(out + k.to(tl.int64) * m + j, total, mask=mask)
