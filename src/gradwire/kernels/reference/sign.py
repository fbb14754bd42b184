"""Signs."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.errors import ConfigurationError
from gradwire.kernels.code import Draws, Layout
from gradwire.kernels.reference._torch import segment_total


class Sign(NamedTuple):
    """The sign of every value and one scale a segment, sign(0) = +1.

    Attributes:
        norm: The scale is ``|t|_1 / d``, the mean magnitude, which loses least, if 1; or ``|t|_2 / sqrt(d)``, which
            keeps the length and loses up to twice its square where a few values have all of it, if 2.
    """

    norm: int = 1

    def check(self) -> None:
        """The norm is 1 or 2."""
        if self.norm not in (1, 2):
            raise ConfigurationError(f"norm={self.norm!r} is not possible; choose 1 or 2")

    @property
    def layout(self) -> Layout:
        """One bit a position and 4 bytes a segment."""
        return Layout(1, 1)

    def measure(self, values: list[Tensor]) -> Tensor | None:
        """The mean magnitude, or the root of the mean square."""
        total = segment_total([t.double().square() if self.norm == 2 else t.double().abs() for t in values])
        if not math.isfinite(total):
            return None
        mean = total / sum(map(len, values))
        return values[0].new_tensor([math.sqrt(mean) if self.norm == 2 else mean])

    def put(self, t: Tensor, scale: Tensor, draws: Draws) -> Tensor:
        """1 where negative."""
        return (t < 0).int()

    def read(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Scaled signs."""
        return torch.where(codes == 1, -scales[:, 0], scales[:, 0])
