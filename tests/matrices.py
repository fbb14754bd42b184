"""Rows of matrices of many shapes, which are taken apart and put together: all at once, or one after another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradwire.kernels import Compensated, Places, reference
from gradwire.layout import Block, Granularity, Slot
from kernel_inputs import normal

MATRICES = [(5, 7, 300, 3), (2200, 20, 33, 4), (2900, 1, 90, 0), (3000, 1, 1, 1), (3010, 40, 70, 6), (5900, 33, 64, 2)]
"""First element, rows, columns, directions."""

NUMEL = 5900 + 33 * 64


def places(apart: int = 0) -> Places:
    """Coordinates in two directions may be further apart than a matrix has rows."""
    rows, p, q = [], 2, 3
    for start, n, m, rank in MATRICES:
        rows.append((start, n, m, rank, p, n + apart, q))
        p, q = p + rank * (n + apart), q + rank * m
    return Places.of(rows)


def _own(place: list[int], coordinates: Tensor, bases: Tensor) -> tuple[Block, Tensor, Tensor]:
    """A matrix, its coordinates and its directions."""
    start, n, m, rank, _, _, q, _ = place
    block = Block.cut([Slot("", (n, m), start)], Granularity("model"))
    return block, _coordinates(place, coordinates), bases[q : q + rank * m].view(rank, m)


def _coordinates(place: list[int], of_all: Tensor) -> Tensor:
    _, n, _, rank, p, apart, _, _ = place
    return of_all[p:][: rank * apart].view(rank, apart)[:, :n]


def taken_apart_and_put_together(kernels: Any, apart: int, values: Tensor, remembers: bool) -> list[Tensor]:
    """What a device's kernels make of all matrices at once, or the reference of one after another where there are none.

    Returns:
        Coordinates, what is left, both together, and combinations of rows.
    """
    table, source = places(apart), Compensated(values, normal(2) if remembers else None, 0.9, 0.3)
    coordinates, bases, rest = normal(3)[:900].clone(), normal(4)[:2000], normal(5)[:NUMEL].clone()
    back, combined = normal(6)[:NUMEL].clone(), normal(7)[:2000].clone()
    drawn = normal(8)[:900]
    if kernels is not None:
        kernels.split_rows_each(table, source, bases, coordinates, rest)
        kernels.add_products(table, coordinates, bases, rest, back)
        coordinates[30:100] = 0
        coordinates[50] = -0.0
        weights = _weights(kernels, table, coordinates, drawn)
        kernels.combine_rows_each(table, weights, back, combined)
        return [coordinates, rest, back, combined]
    for place in table.table.tolist():
        block, found, basis = _own(place, coordinates, bases)
        mine = torch.empty(found.shape)
        reference.split_rows(block, source, basis, mine, rest)
        found.copy_(mine)
        reference.add_product(block, found, basis, rest, back)
    coordinates[30:100] = 0
    coordinates[50] = -0.0
    weights = _weights(None, table, coordinates, drawn)
    for place in table.table.tolist():
        block, some, sums = _own(place, weights, combined)
        reference.combine_rows(block, some, back, sums)
    return [coordinates, rest, back, combined]


def _weights(kernels: Any, table: Places, coordinates: Tensor, drawn: Tensor) -> Tensor:
    """Of each direction its coordinates, or what is drawn if all are 0; by torch where a device has nothing for it."""
    if at_once := getattr(kernels, "weights_each", None):
        weights: Tensor = at_once(table, coordinates, drawn)
        return weights
    weights = torch.zeros_like(coordinates)
    for place in table.table.tolist():
        found, fresh, taken = (_coordinates(place, each) for each in (coordinates, drawn, weights))
        taken.copy_(torch.where((found != 0).any(1, keepdim=True), found, fresh))
    return weights
