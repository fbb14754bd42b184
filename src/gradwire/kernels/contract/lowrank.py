"""Products of a matrix with thin factors."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from gradwire.layout import Block


class LowRank(Protocol):
    """Products of a matrix with thin factors."""

    def project_rows(
        self,
        block: Block,
        gradient: Tensor,
        residual: Tensor | None,
        beta: float,
        gamma: float,
        q: Tensor,
        p: Tensor,
        subtract: bool,
    ) -> bool:
        """``p = q @ t.T`` for a block of one matrix ``t [n, m]``, ``q [r, m]``, ``p [r, n]``.

        Leaves ``t``, or with ``subtract`` ``t - p.T @ q``, in the residual, where finite. Returns whether ``p`` is
        finite, and with it ``t``; if not, ``p`` is NaN and nothing is subtracted.
        """
        ...

    def project_columns(
        self,
        block: Block,
        gradient: Tensor,
        residual: Tensor | None,
        beta: float,
        gamma: float,
        p: Tensor,
        q: Tensor,
        subtract: bool,
    ) -> bool:
        """``q = p @ t``; otherwise as :meth:`project_rows`."""
        ...

    def write_product(self, block: Block, p: Tensor, q: Tensor, out: Tensor, residual: Tensor | None) -> None:
        """``out = p.T @ q`` over a block of one matrix, taken from the residual if one is given, where finite."""
        ...
