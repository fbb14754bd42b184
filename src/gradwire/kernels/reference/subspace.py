"""Rows of a matrix as coordinates in a few directions and what is left, and back.

Ranks end with the same bits by these, so every sum has one order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.compensated import Compensated
from gradwire.kernels.reference._torch import LANES, formed
from gradwire.layout import Block

LARGEST_COORDINATE = 2.0**96
"""A coordinate of this magnitude counts as 0, so that what is left of a row is never beyond float32."""


def split_rows(block: Block, source: Compensated, basis: Tensor, coordinates: Tensor, out: Tensor) -> None:
    """``coordinates = basis @ t.T`` for a block of one matrix ``t [n, m]``, and ``out = t - coordinates.T @ basis``.

    Products are added in ``float64``, element ``j`` of a row in lane ``j % LANES``, in order; lanes are added pairwise,
    the upper half to the lower half, until one is left. Directions are taken off one by one, each product and
    difference rounded to ``float32``. The residual stays as it is.

    Args:
        block: The matrix.
        source: What ``t`` is made of.
        basis: ``float32[r, m]``: orthonormal rows, or zeros.
        coordinates: ``float32[r, n]``, to be filled; 0 for a row with a value that is not finite.
        out: ``float32`` flat buffer.
    """
    (rank, n), start = coordinates.shape, int(block.runs[0, 0])
    t, _ = formed(source, start, start + block.numel)
    rest = rows = t.view(n, basis.shape[1])
    for k in range(rank):
        exact = _sums(rows.double() * basis[k].double())
        coordinates[k] = torch.where(exact.abs() < LARGEST_COORDINATE, exact, 0.0)
        rest = rest - coordinates[k, :, None] * basis[k]
    out[start : start + block.numel] = rest.flatten()


def add_product(block: Block, p: Tensor, q: Tensor, values: Tensor, out: Tensor) -> None:
    """``out = values + p.T @ q`` for a block of one matrix ``[n, m]``, ``p [r, n]``, ``q [r, m]``.

    Terms are added one by one, each product and sum rounded to ``float32``. The buffers may be the same one.
    """
    start = int(block.runs[0, 0])
    total = values[start : start + block.numel].view(p.shape[1], q.shape[1])
    for column, row in zip(p, q, strict=True):
        total = total + column[:, None] * row
    out[start : start + block.numel] = total.flatten()


def combine_rows(block: Block, weights: Tensor, values: Tensor, out: Tensor) -> None:
    """``out = weights @ values`` for a block of one matrix ``[n, m]``, ``weights [r, n]``, ``out [r, m]``.

    Rows are added one by one, each product and sum rounded to ``float32``; those of weight 0 are left out.
    """
    start = int(block.runs[0, 0])
    out.zero_()
    for weight, row in zip(weights.T, values[start : start + block.numel].view(weights.shape[1], -1), strict=True):
        out += torch.where(weight[:, None] != 0, weight[:, None] * row, 0.0)


def _sums(products: Tensor) -> Tensor:
    rows = torch.nn.functional.pad(products, (0, -products.shape[1] % LANES)).view(len(products), -1, LANES)
    lanes = torch.zeros(len(rows), LANES, dtype=torch.float64, device=rows.device)
    for row in rows.unbind(1):
        lanes += row
    while lanes.shape[1] > 1:
        low, high = lanes.chunk(2, dim=1)
        lanes = low + high
    return lanes[:, 0]
