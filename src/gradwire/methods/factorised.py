"""Averages in two thin factors."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs.lowrank import check_rank, gains
from gradwire.methods.method import Method


@dataclass(frozen=True, kw_only=True)
class Factorised(Method):
    """Of each matrix the product of two factors of few rows, which all-reduces average, with error feedback.

    Attributes:
        rank: Rank of the average, at least 1.
    """

    routes = ("allreduce",)
    granularities = ("layer",)
    why_granularity = "it factorises one matrix at a time"
    memory = "residual"
    bias = "contractive"

    rank: int

    def __post_init__(self) -> None:
        check_rank(self.rank)

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Matrices that are larger than their factors."""
        return gains(shape, self.rank)

    def error_bound(self, numel: int) -> float:
        """A projection never lengthens what it projects."""
        return 1.0
