"""Four bits a value: a sign, and how far its exponent lies below the largest."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.kernels.code import Draws, Layout
from gradwire.kernels.reference._torch import largest

ZERO = 7
"""The distance that stands for zero."""


class Exponent(NamedTuple):
    """The nearest of seven powers of two, or zero, as variance-based compression writes its values.

    The largest power is ``2**floor(log2 M)`` for the largest magnitude ``M`` of a segment. Larger values are cut down
    to it, and what is nearer to a power below the seventh is sent as zero. (The published coding has an eighth power,
    and leaves the rest out.) In between a value is off by a third of itself at most. It is biased and needs error
    feedback.
    """

    def check(self) -> None:
        """Has no parameters."""

    @property
    def layout(self) -> Layout:
        """Four bits a position and 4 bytes a segment."""
        return Layout(1, 4)

    def measure(self, values: list[Tensor]) -> Tensor | None:
        """The largest power."""
        peak = largest(values)
        if math.isnan(peak):
            return None
        return (values[0].new_tensor([peak]).view(torch.int32) >> 23 << 23).view(torch.float32)

    def put(self, t: Tensor, scale: Tensor, draws: Draws) -> Tensor:
        """The distance to the exponent field of ``|t|`` after half of the fraction was added, and above it the sign."""
        field = (t.abs().view(torch.int32) + (1 << 22)) >> 23
        distance = ((scale.view(torch.int32) >> 23) - field).clamp(0, ZERO).masked_fill(field == 0, ZERO)
        return distance | (t < 0).int() << 3

    def read(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Signed powers."""
        distance = codes & 7
        magnitudes = ((127 - distance) << 23).view(torch.float32).masked_fill(distance == ZERO, 0)
        return torch.where(codes >> 3 == 1, -magnitudes, magnitudes) * scales[:, 0]
