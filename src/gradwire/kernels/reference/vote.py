"""Signs without a scale, where zeros take a random one."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.kernels.code import Draws, Layout
from gradwire.kernels.reference._torch import largest
from gradwire.kernels.reference.sign import Sign


class Vote(NamedTuple):
    """The sign of every value, +1 or -1, as SignSGD sends it; a zero takes a random sign.

    The majority of votes is the vote on their mean. Its ties are zeros, so they are broken fairly, and equally wherever
    the same key is used. A payload is that of :class:`Sign` with scales of 1.
    """

    def check(self) -> None:
        """Has no parameters."""

    @property
    def layout(self) -> Layout:
        """One bit a position and 4 bytes a segment."""
        return Sign().layout

    def measure(self, values: list[Tensor]) -> Tensor | None:
        """1."""
        return None if math.isnan(largest(values)) else values[0].new_ones(1)

    def put(self, t: Tensor, scale: Tensor, draws: Draws) -> Tensor:
        """1 where negative; for a zero the highest random bit."""
        return torch.where(t == 0, draws() >> 31 == 1, t < 0).int()

    def read(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Signs."""
        return Sign().read(codes, scales)
