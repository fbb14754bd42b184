"""What memories do with whole blocks."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from gradwire.layout import Block


class Memory(Protocol):
    """What memories do with whole blocks."""

    def accumulate(self, block: Block, gradient: Tensor, residual: Tensor, beta: float, gamma: float) -> bool:
        """``residual = beta * residual + gamma * gradient`` over the block's runs; returns whether all is finite."""
        ...

    def narrow(self, block: Block, values: Tensor, kept: Tensor, key: int) -> None:
        """``kept``, bfloat16, takes the finite ``values`` over the block's runs: exactly on average, never infinite.

        Each is rounded to one of its two neighbours, to the farther one with a probability that is its distance from
        the nearer one as a share of theirs.
        """
        ...
