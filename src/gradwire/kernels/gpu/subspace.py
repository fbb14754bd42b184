"""Rows of matrices as coordinates in a few directions and what is left, and back: of all matrices in the same launches.

Every sum has the reference's order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.deferred import Flag, placed
from gradwire.kernels import places
from gradwire.kernels.compensated import Compensated
from gradwire.kernels.gpu._jitted import LANES, compensated
from gradwire.kernels.gpu._launch import jitted, launch
from gradwire.kernels.gpu.lowrank import numbered
from gradwire.kernels.places import Places
from gradwire.kernels.reference import subspace
from gradwire.layout import Block, Int64Array

TOGETHER = 4
"""Directions that a program has at most, a warp for each: what they share they read together."""

HIGH, WIDE = 4, 256
"""Rows and columns of a tile."""

_WARP, _AHEAD = 32, 64
"""Columns of a warp, and rows that are read before they are added."""

_COLUMNS = 8
"""Of a lane that are read before they are added."""

_LONG = 1024

_FIELDS = tl.constexpr(places.FIELDS)
_LARGEST_COORDINATE = tl.constexpr(subspace.LARGEST_COORDINATE)


@dataclass(frozen=True, eq=False)
class _Tables:
    """Of what programs are.

    Attributes:
        matrices: As :class:`Places` has them.
        host: The same, on the host.
    """

    matrices: Tensor
    host: Int64Array

    @cached_property
    def products(self) -> Tensor:
        """``int32[P, 2]``: matrix, and number of a row among as many as it has, for every few directions."""
        return self._numbered(self.host[:, 1] * _groups(self.host))

    @cached_property
    def combined(self) -> Tensor:
        """``int32[P, 2]``: matrix, and number of a warp's columns, for every few directions."""
        return self._numbered(-(-self.host[:, 2] // _WARP) * _groups(self.host))

    @cached_property
    def directions(self) -> Tensor:
        """``int32[P, 2]``: matrix, and number of a direction."""
        return self._numbered(self.host[:, 3])

    @cached_property
    def tiles(self) -> Tensor:
        """``int32[T, 2]``: matrix, and number of a tile, row by row."""
        return self._numbered(-(-self.host[:, 1] // HIGH) * -(-self.host[:, 2] // WIDE))

    def _numbered(self, counts: Int64Array) -> Tensor:
        return placed(np.stack(numbered(counts), axis=1).astype(np.int32), self.matrices.device)


def _groups(host: Int64Array) -> Int64Array:
    return -(-host[:, 3] // TOGETHER)


_tables: WeakKeyDictionary[Places, dict[torch.device, _Tables]] = WeakKeyDictionary()


def _tables_of(rows: Places, device: torch.device) -> _Tables:
    """Made once."""
    kept = _tables.setdefault(rows, {})
    if device not in kept:
        kept[device] = _Tables(placed(rows.table, device), rows.table)
    return kept[device]


def split_rows(block: Block, source: Compensated, basis: Tensor, coordinates: Tensor, out: Tensor) -> None:
    split_rows_each(Places.alone(block, coordinates, basis), source, basis, coordinates, out)


def add_product(block: Block, p: Tensor, q: Tensor, values: Tensor, out: Tensor) -> None:
    add_products(Places.alone(block, p, q), p, q, values, out)


def combine_rows(block: Block, weights: Tensor, values: Tensor, out: Tensor) -> None:
    combine_rows_each(Places.alone(block, weights, out), weights, values, out)


def split_rows_each(rows: Places, source: Compensated, basis: Tensor, coordinates: Tensor, out: Tensor) -> None:
    """``split_rows`` of matrices that share all buffers."""
    (gradient, residual, beta, gamma), tables = source, _tables_of(rows, out.device)
    values, keeps = (gradient, gradient if residual is None else residual, beta, gamma), residual is not None
    products = tables.products
    arguments = (products, tables.matrices, *values, basis, coordinates)
    launch(_project, len(products), *arguments, KEEP=keeps, HEIGHT=TOGETHER, AHEAD=_COLUMNS, warps=TOGETHER)
    _add(tables, values, keeps, coordinates, basis, -1.0, out, None)


def add_products(rows: Places, p: Tensor, q: Tensor, values: Tensor, out: Tensor, only_if: Flag | None = None) -> None:
    """``add_product``, as :func:`split_rows_each`; nothing is done unless the flag holds, if there is one."""
    _add(_tables_of(rows, out.device), (values, values, 1.0, 1.0), False, p, q, 1.0, out, only_if)


def combine_rows_each(rows: Places, weights: Tensor, values: Tensor, out: Tensor) -> None:
    """``combine_rows``, as :func:`split_rows_each`."""
    tables = _tables_of(rows, out.device)
    shape = {"HEIGHT": TOGETHER, "WIDTH": _WARP, "AHEAD": _AHEAD, "warps": TOGETHER}
    launch(_combine, len(tables.combined), tables.combined, tables.matrices, weights, values, out, **shape)


def weights_each(rows: Places, read: Tensor, drawn: Tensor) -> Tensor:
    """Of each direction what was read, or what is drawn if that is all 0."""
    tables, weights = _tables_of(rows, read.device), torch.empty_like(read)
    launch(_choose, len(tables.directions), tables.directions, tables.matrices, read, drawn, weights, LENGTH=_LONG)
    return weights


def _add(
    tables: _Tables,
    values: tuple[Tensor, Tensor, float, float],
    keeps: bool,
    p: Tensor,
    q: Tensor,
    sign: float,
    out: Tensor,
    only_if: Flag | None,
) -> None:
    asked = out if only_if is None else only_if.view(torch.uint8)
    arguments = (tables.tiles, tables.matrices, *values, p, q, sign, out, asked)
    shape = {"HEIGHT": HIGH, "WIDTH": WIDE}
    launch(_add_multiples, len(tables.tiles), *arguments, KEEP=keeps, ASK=only_if is not None, **shape)


@triton.jit
def _place_of(pieces, matrices):
    """What is said of the program's matrix, the first element of its rows, how many and how long they are; a number."""
    piece = pieces + 2 * tl.program_id(0).to(tl.int64)
    row = matrices + _FIELDS * tl.load(piece)
    return row, tl.load(row), tl.load(row + 1).to(tl.int32), tl.load(row + 2).to(tl.int32), tl.load(piece + 1)


@triton.jit
def _sums_of_lanes(lanes, HEIGHT: tl.constexpr):
    """Of each row of lanes, as ``sum_of_lanes``."""
    lanes = tl.sum(tl.reshape(lanes, (HEIGHT, 2, 16)), axis=1)
    lanes = tl.sum(tl.reshape(lanes, (HEIGHT, 2, 8)), axis=1)
    lanes = tl.sum(tl.reshape(lanes, (HEIGHT, 2, 4)), axis=1)
    lanes = tl.sum(tl.reshape(lanes, (HEIGHT, 2, 2)), axis=1)
    return tl.sum(tl.reshape(lanes, (HEIGHT, 2)), axis=1)


@jitted("gradient", "residual", "beta", "gamma", "basis", "coordinates")
def _project(
    pieces,
    matrices,
    gradient,
    residual,
    beta,
    gamma,
    basis,
    coordinates,
    KEEP: tl.constexpr,
    HEIGHT: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Products of a row and directions: element ``j`` is added in lane ``j % LANES``, in order."""
    row, start, n, m, number = _place_of(pieces, matrices)
    rank = tl.load(row + 3)
    i = (number % n).to(tl.int64)
    below = (number // n) * HEIGHT
    first = start + i * m
    lane = tl.arange(0, HEIGHT * LANES)
    k = below + lane // LANES
    by = basis + tl.load(row + 6) + k.to(tl.int64) * m
    total = tl.zeros((HEIGHT * LANES,), tl.float64)
    for column in range(0, m, AHEAD * LANES):
        values = ()
        factors = ()
        for ahead in tl.static_range(AHEAD):
            j = column + ahead * LANES + lane % LANES
            mask = (k < rank) & (j < m)
            t, _ = compensated(gradient, residual, first + j, mask, beta, gamma, KEEP)
            values += (t,)  # type: ignore[assignment]
            factors += (tl.load(by + j, mask=mask, other=0.0),)  # type: ignore[assignment]
        for ahead in tl.static_range(AHEAD):
            total += values[ahead].to(tl.float64) * factors[ahead].to(tl.float64)
    exact = _sums_of_lanes(total, HEIGHT)
    exact = tl.where(tl.abs(exact) < _LARGEST_COORDINATE, exact, 0.0)
    k = below + tl.arange(0, HEIGHT)
    tl.store(coordinates + tl.load(row + 4) + k * tl.load(row + 5) + i, exact.to(tl.float32), mask=k < rank)


@jitted("gradient", "residual", "beta", "gamma", "p", "q", "sign", "out", "asked")
def _add_multiples(
    pieces,
    matrices,
    gradient,
    residual,
    beta,
    gamma,
    p,
    q,
    sign,
    out,
    asked,
    KEEP: tl.constexpr,
    ASK: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row, start, n, m, number = _place_of(pieces, matrices)
    rank = tl.load(row + 3).to(tl.int32)
    if ASK:
        wanted = tl.load(asked) != 0
        n = tl.where(wanted, n, 0)
        rank = tl.where(wanted, rank, 0)
    columns = (m + (WIDTH - 1)) // WIDTH
    i = (number // columns).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    j = (number % columns).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    at = start + i[:, None] * m + j[None, :]
    mask = (i < n)[:, None] & (j < m)[None, :]
    total, _ = compensated(gradient, residual, at, mask, beta, gamma, KEEP)
    apart = tl.load(row + 5)
    p += tl.load(row + 4) + i
    q += tl.load(row + 6) + j
    for k in range(rank):
        coordinates = tl.load(p + k * apart, mask=i < n, other=0.0) * sign
        directions = tl.load(q + tl.cast(k, tl.int64) * m, mask=j < m, other=0.0)
        total += coordinates[:, None] * directions[None, :]
    tl.store(out + at, total, mask=mask)


@jitted("read", "drawn")
def _choose(pieces, matrices, read, drawn, weights, LENGTH: tl.constexpr):
    row, _, n, _, k = _place_of(pieces, matrices)
    first = tl.load(row + 4) + k * tl.load(row + 5)
    lane = tl.arange(0, LENGTH)
    some = tl.zeros((LENGTH,), tl.int32)
    for begin in range(0, n, LENGTH):
        t = tl.load(read + first + begin + lane, mask=begin + lane < n, other=0.0)
        some = some | (t != 0).to(tl.int32)
    known = tl.broadcast_to(tl.max(some, axis=0, keep_dims=True), (LENGTH,)) > 0
    for begin in range(0, n, LENGTH):
        at = first + begin + lane
        mask = begin + lane < n
        t = tl.load(read + at, mask=mask & known, other=0.0)
        fresh = tl.load(drawn + at, mask=mask & (known == 0), other=0.0)
        tl.store(weights + at, tl.where(known, t, fresh), mask=mask)


@jitted("weights", "values")
def _combine(pieces, matrices, weights, values, out, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, AHEAD: tl.constexpr):
    """A warp a combination. The rows ahead are read before they are wanted."""
    row, start, n, m, number = _place_of(pieces, matrices)
    rank = tl.load(row + 3)
    columns = (m + (WIDTH - 1)) // WIDTH
    lane = tl.arange(0, HEIGHT * WIDTH)
    k = (number // columns) * HEIGHT + lane // WIDTH
    j = (number % columns) * WIDTH + lane % WIDTH
    mask = (k < rank) & (j < m)
    own = weights + tl.load(row + 4) + k * tl.load(row + 5)
    values += start
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
    tl.store(out + tl.load(row + 6) + k.to(tl.int64) * m + j, total, mask=mask)
