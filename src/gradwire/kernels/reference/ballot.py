"""Whole votes."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.kernels.code import TRITS, Draws, Layout
from gradwire.kernels.reference._torch import LARGEST_SCALE, SMALLEST_SCALE, largest, segment_total
from gradwire.kernels.reference.qsgd import check_bits


class Ballot(NamedTuple):
    """Votes from -s to s, as many as a value has steps of ``2 / s`` of its segment's mean magnitude, as in Lion Cub.

    The vote on ``t`` has its sign and is ``floor(|t| * (1 / step) + (s + 1/2)) - s`` in float32, s at most: with three
    votes, whoever is below the mean magnitude abstains, and who is at it, such as a value that is alone, does not. A
    vote counts the same whatever its step was, so sums of votes are elections.

    Attributes:
        bits: Bits a vote: 4 or 8, or 2 for three votes, of which five are in a byte; ``s = 2**(bits - 1) - 1``.
        signs: Whether every value that is not zero has its sign for a vote, as the answer to an election.
    """

    bits: int = 2
    signs: bool = False

    def check(self) -> None:
        """Knows how to pack votes of 2, 4 or 8 bits."""
        check_bits(self.bits)

    @property
    def layout(self) -> Layout:
        """8 bytes a segment, and ``bits`` a position, or a byte for five."""
        return Layout(2, TRITS if self.bits == 2 else self.bits)

    def measure(self, values: list[Tensor]) -> Tensor | None:
        """What a vote counts, 1, and the step, 0 if too small to divide by."""
        if math.isnan(largest(values)):
            return None
        mean = segment_total([t.double().abs() for t in values]) / sum(map(len, values))
        step = 0.0 if self.signs else 2 * mean / self.levels
        return values[0].new_tensor([1.0, min(step, LARGEST_SCALE) if step >= SMALLEST_SCALE else 0.0])

    def put(self, t: Tensor, scale: Tensor, draws: Draws) -> Tensor:
        """A vote, plus s."""
        if self.signs:
            return t.sign().to(torch.int32) + self.levels
        inverse = 1 / scale[1] if scale[1] > 0 else torch.zeros_like(scale[1])
        steps = (t.abs() * inverse + (self.levels + 0.5)).clamp(max=2 * self.levels).to(torch.int32)
        return torch.where(t < 0, 2 * self.levels - steps, steps)

    def read(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Votes, by what one counts."""
        return (codes.clamp(max=2 * self.levels) - self.levels).float() * scales[:, 0]

    @property
    def levels(self) -> int:
        """Votes for either side."""
        return (1 << (self.bits - 1)) - 1
