"""Values at positions: read, written, added up, merged."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from gradwire.layout import Block, Int64Array


class Sparse(Protocol):
    """Values at positions: read, written, added up, merged."""

    def gather(self, block: Block, source: Tensor, positions: Tensor, values: Tensor) -> None:
        """``values[j] = source`` at ``positions[j]``."""
        ...

    def scatter(self, block: Block, target: Tensor, positions: Tensor, values: Tensor) -> None:
        """``target = values`` at ``positions``."""
        ...

    def subtract(self, block: Block, residual: Tensor, positions: Tensor, values: Tensor) -> None:
        """``residual -= values`` at ``positions``; values that are not finite count as not sent."""
        ...

    def scatter_sum(
        self,
        block: Block,
        positions: Tensor,
        values: Tensor,
        out: Tensor,
        weight: float,
        filled: Int64Array | None = None,
    ) -> None:
        """``out = weight * sum over rows`` of sparse rows ``positions[n, K]``, ``values[n, K]``; zero elsewhere.

        With ``filled`` only the first ``filled[n]`` entries of each row count.
        """
        ...

    def scatter_mean(self, block: Block, positions: Tensor, values: Tensor, out: Tensor) -> None:
        """``out`` = the mean over those sparse rows, ascending each, that have the position; zero elsewhere."""
        ...

    def merge_top(
        self,
        counts: Int64Array,
        first_positions: Tensor,
        first_values: Tensor,
        second_positions: Tensor,
        second_values: Tensor,
        positions: Tensor,
        values: Tensor,
    ) -> None:
        """The ``counts[s]`` largest magnitudes of the sum of two sparse sets with as many values in each segment ``s``.

        A segment whose sum is not finite has its first positions, with values NaN.
        """
        ...

    def survivors(self, positions: Tensor, kept_positions: Tensor, kept_values: Tensor, flags: Tensor) -> None:
        """Clears the flags, ``bool``, of ascending positions where an ascending set has no finite value."""
        ...
