"""One bit a value and the mean of either side."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.kernels.code import Draws, Layout
from gradwire.kernels.reference._torch import segment_total


class OneBit(NamedTuple):
    """Whether a value is negative, and the mean of either side of a segment, as 1-bit SGD has them.

    It is the best that two values can do once the sides are chosen, so it contracts: ``|t - sent|^2 <= |t|^2 -
    |sent|^2``. It is biased and needs error feedback.
    """

    def check(self) -> None:
        """Has no parameters."""

    @property
    def layout(self) -> Layout:
        """One bit a position and 8 bytes a segment."""
        return Layout(2, 1)

    def measure(self, values: list[Tensor]) -> Tensor | None:
        """The mean of the values that are not negative, and of those that are; 0 where there are none."""
        above = segment_total([t.double().masked_fill(t < 0, 0) for t in values])
        below = segment_total([t.double().masked_fill(~(t < 0), 0) for t in values])
        if not math.isfinite(above + below):
            return None
        negatives = sum(int((t < 0).sum()) for t in values)
        others = sum(map(len, values)) - negatives
        return values[0].new_tensor([above / max(others, 1), below / max(negatives, 1)])

    def put(self, t: Tensor, scale: Tensor, draws: Draws) -> Tensor:
        """1 where negative."""
        return (t < 0).int()

    def read(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Means."""
        return torch.where(codes == 1, scales[:, 1], scales[:, 0])
