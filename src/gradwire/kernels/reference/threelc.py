"""Minus one, zero or one, whichever is nearest."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from gradwire.errors import ConfigurationError
from gradwire.kernels.code import TRITS, Draws, Layout
from gradwire.kernels.reference._torch import largest

LARGEST_FLOAT = (2 - 2.0**-23) * 2.0**127
"""The largest finite float32."""


class ThreeLC(NamedTuple):
    """Zero or plus or minus ``M``, whichever is nearest, as 3LC has them: five a byte.

    ``M`` is the sparsity times the largest magnitude of a segment. It is biased and needs error feedback.

    Attributes:
        sparsity: How sparse, in [1, 2): a value is sent if it exceeds ``sparsity / 2`` of the largest.
    """

    sparsity: float = 1.0

    def check(self) -> None:
        """Sends the largest value."""
        if not 1 <= self.sparsity < 2:
            raise ConfigurationError(f"sparsity={self.sparsity!r} is out of range; choose 1 <= sparsity < 2, usually 1")

    @property
    def layout(self) -> Layout:
        """A byte for five positions and 4 bytes a segment."""
        return Layout(1, TRITS)

    def measure(self, values: list[Tensor]) -> Tensor | None:
        """``M``."""
        peak = largest(values)
        return None if math.isnan(peak) else values[0].new_tensor([min(self.sparsity * peak, LARGEST_FLOAT)])

    def put(self, t: Tensor, scale: Tensor, draws: Draws) -> Tensor:
        """0, 1 or 2."""
        threshold = scale * 0.5
        return (t > threshold).int() - (t < -threshold).int() + 1

    def read(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Scaled digits."""
        return (codes - 1).float() * scales[:, 0]
