"""Products with thin factors, of all matrices in the same launches, however many and whatever their shapes.

A product's sums have one order, so its bits are the same on any GPU; those of projections are each worker's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.deferred import Flag, placed, shared
from gradwire.kernels.compensated import Compensated
from gradwire.kernels.gpu._jitted import INFINITE, INFINITY, compensated, magnitude_bits
from gradwire.kernels.gpu._launch import jitted, launch
from gradwire.kernels.places import joined, lie_together
from gradwire.layout import Block, Int64Array

TILES = ((4, 256), (64, 64))
"""Rows and columns of a program's tile, where sums run along rows, or nothing is summed, and where along columns."""

LENGTH = 256
"""Values of a factor that a program handles."""

DEPTH = 16
"""Parts of a sum that a program reads at once."""

FIELDS = tl.constexpr(8)


@dataclass(frozen=True, eq=False)
class _Tables:
    """Where matrices of some ranks and their factors lie, which follow one another.

    Attributes:
        matrices: ``int64[M, 8]``: first element, rows, columns, rank, where the factor of the rows begins and that of
            the columns, and where the parts of each begin.
        tiles: Of each kind, ``int32[T, 3]``: matrix, row of tiles, column of tiles.
        pieces: Of the factors of the rows, and of the columns: ``int32[P, 2]``, matrix and first value.
        values: Of the factors of the rows, and of the columns.
        parts: Values that their parts take.
    """

    matrices: Tensor
    tiles: tuple[Tensor, ...]
    pieces: tuple[Tensor, ...]
    values: tuple[int, ...]
    parts: tuple[int, ...]

    @classmethod
    def of(cls, starts: list[int], shapes: list[tuple[int, int, int]], move: Callable[[Any], Tensor]) -> _Tables:
        n, m, rank = (np.array(side, np.int64) for side in zip(*shapes, strict=True))
        wide, high = -(-m // TILES[0][1]), -(-n // TILES[1][0])
        sizes = (rank * n, rank * m, wide * rank * n, high * rank * m)
        begins = [np.cumsum(size) - size for size in sizes]
        tiles = []
        for height, width in TILES:
            columns = -(-m // width)
            matrix, tile = numbered(-(-n // height) * columns)
            tiles.append(np.stack((matrix, tile // columns[matrix], tile % columns[matrix]), axis=1).astype(np.int32))
        pieces = [np.stack(numbered(-(-size // LENGTH)), axis=1) for size in sizes[:2]]
        totals = [int(size.sum()) for size in sizes]
        return cls(
            move(np.stack((np.array(starts, np.int64), n, m, rank, *begins), axis=1)),
            tuple(move(each) for each in tiles),
            tuple(move(each.astype(np.int32)) for each in pieces),
            tuple(totals[:2]),
            tuple(totals[2:]),
        )


def numbered(counts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """For so many of each: whose each one is, and the number that it has there."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]


_tables: WeakKeyDictionary[Block, dict[tuple[object, ...], tuple[tuple[Block, ...], _Tables]]] = WeakKeyDictionary()


def _tables_of(blocks: Sequence[Block], p: Sequence[Tensor], q: Sequence[Tensor]) -> _Tables:
    """Made once for matrices and ranks; ``p`` and ``q`` are of the first dimensions of these or of more."""
    kept, device = _tables.setdefault(blocks[0], {}), p[0].device
    shapes = [(rows.shape[2], columns.shape[2], rows.shape[1]) for rows, columns in zip(p, q, strict=True)]
    counts = [len(rows) for rows in p]
    key = device, *map(id, blocks[1:]), *shapes
    if key not in kept:
        each = [shape for shape, count in zip(shapes, counts, strict=True) for _ in range(count)]
        starts = [int(block.runs[0, 0]) for block in blocks]
        made = _Tables.of(starts, each, partial(placed, device=device))
        kept[key] = tuple(blocks[1:]), made  # so that none of them is another with its id
    return kept[key][1]


def project_rows(block: Block, source: Compensated, q: Tensor, p: Tensor, subtract: Tensor | None) -> Flag:
    given = None if subtract is None else [subtract[None]]
    return project_rows_each((block,), source, [q[None]], [p[None]], given)[0].lt(INFINITE.value)


def project_columns(block: Block, source: Compensated, p: Tensor, q: Tensor, subtract: Tensor | None) -> Flag:
    given = None if subtract is None else [subtract[None]]
    return project_columns_each((block,), source, [p[None]], [q[None]], given)[0].lt(INFINITE.value)


def write_product(block: Block, p: Tensor, q: Tensor, out: Tensor, residual: Tensor | None) -> None:
    write_products((block,), [p[None]], [q[None]], out, residual)


def project_rows_each(
    blocks: Sequence[Block],
    source: Compensated,
    q: Sequence[Tensor],
    p: Sequence[Tensor],
    subtract: Sequence[Tensor] | None,
) -> Tensor:
    """``project_rows`` of matrices in groups of one shape, whose factors are stacked.

    Returns:
        ``int32[M]``: of each matrix and its factor the bits of the largest magnitude.
    """
    return _project_each(0, blocks, source, p, q, subtract)


def project_columns_each(
    blocks: Sequence[Block],
    source: Compensated,
    p: Sequence[Tensor],
    q: Sequence[Tensor],
    subtract: Sequence[Tensor] | None,
) -> Tensor:
    """``project_columns``, as :func:`project_rows_each`."""
    return _project_each(1, blocks, source, p, q, subtract)


def write_products(
    blocks: Sequence[Block], p: Sequence[Tensor], q: Sequence[Tensor], out: Tensor, residual: Tensor | None
) -> None:
    """``write_product``, as :func:`project_rows_each`."""
    _write_all(_tables_of(blocks, p, q), joined(p), joined(q), out, residual)


def remember_factors(kept: Sequence[Tensor], found: Sequence[Tensor]) -> list[Tensor]:
    """Copies factors that are finite to what is kept; returns all, as NaN where they are not."""
    matrices = _factors_of(tuple(tuple(factors.shape) for factors in found), found[0].device)
    in_place, new = lie_together(kept), torch.cat([factors.reshape(-1) for factors in found])
    known = joined(kept)
    peaks = torch.zeros(len(matrices.matrices), dtype=torch.int32, device=new.device)
    pieces = matrices.pieces[0]
    launch(_find_peaks, len(pieces), pieces, matrices.matrices, new, peaks, LENGTH=LENGTH)
    launch(_remember, len(pieces), pieces, matrices.matrices, new, known, peaks, LENGTH=LENGTH)
    if not in_place:
        parts = known.split([factors.numel() for factors in kept])
        torch._foreach_copy_(list(kept), [part.view(each.shape) for part, each in zip(parts, kept, strict=True)])
    parts = new.split([factors.numel() for factors in found])
    return [part.view(each.shape) for part, each in zip(parts, found, strict=True)]


@cache
def _factors_of(shapes: tuple[tuple[int, ...], ...], device: torch.device) -> _Tables:
    """Of factors alone, as if of matrices of one column."""
    each = [(n, 1, rank) for count, rank, n in shapes for _ in range(count)]
    return _Tables.of([0] * len(each), each, partial(shared, device=device))


def _project_each(
    side: int,
    blocks: Sequence[Block],
    source: Compensated,
    p: Sequence[Tensor],
    q: Sequence[Tensor],
    subtract: Sequence[Tensor] | None,
) -> Tensor:
    """Fills the factors of a side, of the rows (0) or the columns (1), by those of the other; returns the peaks."""
    tables, to, given = _tables_of(blocks, p, q), (p, q)[side], (q, p)[side]
    in_place = lie_together(to)
    computed = joined(to) if in_place else to[0].new_empty(tables.values[side])
    peaks = _project(tables, source, joined(given), computed, side)
    if subtract is not None and source.residual is not None:
        back = joined(subtract)
        _write_all(tables, *((back, computed) if side else (computed, back)), None, source.residual)
    if not in_place:
        parts = torch.split(computed, [each.numel() for each in to])
        torch._foreach_copy_(list(to), [part.view(each.shape) for part, each in zip(parts, to, strict=True)])
    return peaks


def _project(tables: _Tables, source: Compensated, fixed: Tensor, computed: Tensor, side: int) -> Tensor:
    """Computes the factors of a side, NaN where a matrix or its factor is not finite; leaves ``t``; returns peaks."""
    gradient, residual, beta, gamma = source
    peaks = torch.zeros(len(tables.matrices), dtype=torch.int32, device=gradient.device)
    parts = gradient.new_empty(tables.parts[side])
    tiles, pieces, (height, width) = tables.tiles[side], tables.pieces[side], TILES[side]
    values = gradient, gradient if residual is None else residual
    arguments = (tiles, tables.matrices, *values, fixed, parts, peaks, beta, gamma)
    shape = {"HEIGHT": height, "WIDTH": width, "warps": height * width // 1024}
    launch(_project_tiles, len(tiles), *arguments, KEEP=residual is not None, FACTOR=side, **shape)
    found = (pieces, tables.matrices, parts, computed, peaks)
    launch(_add_parts, len(pieces), *found, FACTOR=side, SIDE=height if side else width, LENGTH=LENGTH, DEPTH=DEPTH)
    launch(_mark, len(pieces), pieces, tables.matrices, computed, peaks, FACTOR=side, LENGTH=LENGTH)
    return peaks


def _write_all(tables: _Tables, p: Tensor, q: Tensor, out: Tensor | None, residual: Tensor | None) -> None:
    tiles, (height, width) = tables.tiles[0], TILES[0]
    launch(
        _write,
        len(tiles),
        tiles,
        tables.matrices,
        p,
        q,
        p if out is None else out,
        p if residual is None else residual,
        STORE=out is not None,
        KEEP=residual is not None,
        HEIGHT=height,
        WIDTH=width,
    )


@triton.jit
def _tile_of(tiles, matrices, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """The tile's matrix and what is said of it, its rows and columns, and where its elements lie that there are."""
    tile = tiles + 3 * tl.program_id(0).to(tl.int64)
    matrix = tl.load(tile)
    row = matrices + FIELDS * matrix
    n = tl.load(row + 1)
    m = tl.load(row + 2)
    i = tl.load(tile + 1).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    j = tl.load(tile + 2).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    at = tl.load(row) + i[:, None] * m + j[None, :]
    return matrix, row, i, j, n, m, at, (i < n)[:, None] & (j < m)[None, :]


@jitted("gradient", "residual", "fixed", "beta", "gamma")
def _project_tiles(
    tiles,
    matrices,
    gradient,
    residual,
    fixed,
    parts,
    peaks,
    beta,
    gamma,
    KEEP: tl.constexpr,
    FACTOR: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Leaves ``t``, and a tile's part of each value of a factor: the rows' (0) or the columns' (1)."""
    matrix, row, i, j, n, m, at, mask = _tile_of(tiles, matrices, HEIGHT, WIDTH)
    t, r = compensated(gradient, residual, at, mask, beta, gamma, KEEP)
    if KEEP:
        tl.store(residual + at, tl.where(tl.abs(t) < INFINITY, t, r), mask=mask)
    tl.atomic_max(peaks + matrix, tl.max(tl.max(magnitude_bits(t), axis=1), axis=0), sem="relaxed")
    rank = tl.load(row + 3)
    parts += tl.load(row + (6 + FACTOR))
    tile = tiles + 3 * tl.program_id(0).to(tl.int64)
    if FACTOR == 0:
        given = fixed + tl.load(row + 5) + j
        to = parts + tl.load(tile + 2) * rank * n + i
        for k in range(rank):
            by = tl.load(given + k * m, mask=j < m, other=0.0)
            tl.store(to + k * n, tl.sum(t * by[None, :], axis=1), mask=i < n)
    else:
        given = fixed + tl.load(row + 4) + i
        to = parts + tl.load(tile + 1) * rank * m + j
        for k in range(rank):
            by = tl.load(given + k * n, mask=i < n, other=0.0)
            tl.store(to + k * m, tl.sum(t * by[:, None], axis=0), mask=j < m)


@triton.jit
def _piece_of(pieces, matrices, FACTOR: tl.constexpr, LENGTH: tl.constexpr):
    """The piece's matrix and what is said of it, its values' numbers in a factor, and how many that has."""
    piece = pieces + 2 * tl.program_id(0).to(tl.int64)
    matrix = tl.load(piece)
    row = matrices + FIELDS * matrix
    numel = tl.load(row + 3) * tl.load(row + (1 + FACTOR))
    return matrix, row, tl.load(piece + 1).to(tl.int64) * LENGTH + tl.arange(0, LENGTH), numel


@jitted("computed")
def _add_parts(
    pieces,
    matrices,
    parts,
    computed,
    peaks,
    FACTOR: tl.constexpr,
    SIDE: tl.constexpr,
    LENGTH: tl.constexpr,
    DEPTH: tl.constexpr,
):
    matrix, row, i, numel = _piece_of(pieces, matrices, FACTOR, LENGTH)
    parts += tl.load(row + (6 + FACTOR))
    count = (tl.load(row + (2 - FACTOR)) + (SIDE - 1)) // SIDE
    number = tl.arange(0, DEPTH).to(tl.int64)
    total = tl.zeros((DEPTH, LENGTH), tl.float32)
    for first in range(0, count, DEPTH):
        mask = (first + number < count)[:, None] & (i < numel)[None, :]
        total += tl.load(parts + (first + number)[:, None] * numel + i[None, :], mask=mask, other=0.0)
    value = tl.sum(total, axis=0)
    tl.store(computed + tl.load(row + (4 + FACTOR)) + i, value, mask=i < numel)
    tl.atomic_max(peaks + matrix, tl.max(tl.where(i < numel, magnitude_bits(value), 0), axis=0), sem="relaxed")


@triton.jit
def _find_peaks(pieces, matrices, found, peaks, LENGTH: tl.constexpr):
    matrix, row, i, numel = _piece_of(pieces, matrices, 0, LENGTH)
    value = tl.load(found + tl.load(row + 4) + i, mask=i < numel, other=0.0)
    tl.atomic_max(peaks + matrix, tl.max(magnitude_bits(value), axis=0), sem="relaxed")


@jitted("kept")
def _remember(pieces, matrices, found, kept, peaks, LENGTH: tl.constexpr):
    matrix, row, i, numel = _piece_of(pieces, matrices, 0, LENGTH)
    lost = tl.broadcast_to(tl.load(peaks + matrix + tl.arange(0, 1)), (LENGTH,)) >= INFINITE
    at = tl.load(row + 4) + i
    value = tl.load(found + at, mask=i < numel, other=0.0)
    tl.store(kept + at, value, mask=(lost == 0) & (i < numel))
    tl.store(found + at, tl.full((LENGTH,), float("nan"), tl.float32), mask=lost & (i < numel))


@jitted("computed")
def _mark(pieces, matrices, computed, peaks, FACTOR: tl.constexpr, LENGTH: tl.constexpr):
    """Makes a factor NaN if it or its matrix is not finite, so that its product is, which no residual keeps."""
    matrix, row, i, numel = _piece_of(pieces, matrices, FACTOR, LENGTH)
    lost = tl.broadcast_to(tl.load(peaks + matrix + tl.arange(0, 1)), (LENGTH,)) >= INFINITE
    nothing = tl.full((LENGTH,), float("nan"), tl.float32)
    tl.store(computed + tl.load(row + (4 + FACTOR)) + i, nothing, mask=lost & (i < numel))


@jitted("out", "residual")
def _write(
    tiles,
    matrices,
    p,
    q,
    out,
    residual,
    STORE: tl.constexpr,
    KEEP: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """``out = p.T @ q``, and takes it from the residual where what is left is finite."""
    _, row, i, j, n, m, at, mask = _tile_of(tiles, matrices, HEIGHT, WIDTH)
    p += tl.load(row + 4) + i
    q += tl.load(row + 5) + j
    total = tl.load(p, mask=i < n, other=0.0)[:, None] * tl.load(q, mask=j < m, other=0.0)[None, :]
    for k in range(1, tl.load(row + 3)):
        of_row = tl.load(p + k * n, mask=i < n, other=0.0)
        of_column = tl.load(q + k * m, mask=j < m, other=0.0)
        total += of_row[:, None] * of_column[None, :]
    if STORE:
        tl.store(out + at, total, mask=mask)
    if KEEP:
        r = tl.load(residual + at, mask=mask, other=0.0)
        left = r - total
        tl.store(residual + at, tl.where(tl.abs(left) < INFINITY, left, r), mask=mask)
