"""Orthonormal rows by Householder's reflections, with the same bits on every kind of machine."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.exact import brought_to_one, inner, root


def orthonormalise(rows: Tensor) -> None:
    """Replaces the rows of ``float32[k, r, n]``, ``r <= n``, by orthonormal ones that span at least what they did.

    That holds for dependent and for zero rows, too. Where a matrix is not finite, it becomes NaN.

    Row ``j`` is reflected onto the axis ``j``: with its part ``x`` from ``j`` on, ``v = (x + sign(x_0) |x| e_0) / 2``
    and ``H = I - 4 / (|x| (|x| + |x_0|)) v v^T``. The result is the first axes, reflected back. All is ``float64``,
    and inner products are exact sums.
    """
    _, r, n = rows.shape
    finite = rows.isfinite().all(2, keepdim=True).all(1, keepdim=True)
    left, _ = brought_to_one(torch.where(finite, rows, 0.0).double())
    axes = torch.eye(r, n, dtype=torch.float64, device=rows.device).repeat(len(rows), 1, 1)
    reflections = []
    for j in range(r):
        x, _ = brought_to_one(left[:, j : j + 1, j:])
        size = root(inner(x, x))
        first = x[:, :, :1]
        gain = torch.where(size == 0, 0.0, 4 / (size * (size + first.abs())))
        v = torch.cat((first + torch.where(first < 0, -size, size), x[:, :, 1:]), 2) / 2
        reflections.append((v, gain))
        left[:, j + 1 :, j:] -= gain * inner(v, left[:, j + 1 :, j:]) * v
    for j, (v, gain) in reversed(list(enumerate(reflections))):
        axes[:, j:, j:] -= gain * inner(v, axes[:, j:, j:]) * v
    rows.copy_(torch.where(finite, axes, torch.nan))
