"""Minus one, zero or one, drawn so that the mean is right."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.errors import ConfigurationError
from gradwire.kernels.code import TRITS, Draws, Layout
from gradwire.kernels.reference._torch import SMALLEST_SCALE, largest, segment_total

SMALLEST_VARIANCE = 2.0**-40
"""A smaller share of the mean square may be nothing but rounding, and counts as no variance."""


class TernGrad(NamedTuple):
    """Zero or plus or minus the scale of a segment, as TernGrad has them: five a byte.

    A value ``t`` is sent as ``sign(t) * scale`` where ``u < |t| * (1 / scale)``, with ``u`` the middle of one of
    ``2**23`` equal parts of [0, 1), so it is right on average where it was not clipped. The scale is the largest
    magnitude. The squared error is ``scale |t|_1 - |t|^2`` on average.

    Attributes:
        clip: Standard deviations to which a segment is clipped first, 2.5 in the paper's experiments; 0 for none. A
            segment whose values are all equal is not clipped.
    """

    clip: float = 0.0

    def check(self) -> None:
        """Clips at a finite share."""
        if not 0 <= self.clip < math.inf:
            raise ConfigurationError(f"clip={self.clip!r} is out of range; choose clip > 0, usually 2.5, or 0 for none")

    @property
    def layout(self) -> Layout:
        """A byte for five positions and 4 bytes a segment."""
        return Layout(1, TRITS)

    def measure(self, values: list[Tensor]) -> Tensor | None:
        """The largest magnitude, or ``clip`` standard deviations if that is less; 0 if too small to divide by."""
        scale = largest(values)
        if math.isnan(scale):
            return None
        if self.clip:
            numel = sum(map(len, values))
            mean = segment_total([t.double() for t in values]) / numel
            mean_square = segment_total([t.double().square() for t in values]) / numel
            variance = mean_square - mean * mean
            if variance > SMALLEST_VARIANCE * mean_square:
                scale = min(scale, self.clip * math.sqrt(variance))
        return values[0].new_tensor([0.0 if scale < SMALLEST_SCALE else scale])

    def put(self, t: Tensor, scale: Tensor, draws: Draws) -> Tensor:
        """0, 1 or 2."""
        inverse = 1 / scale if scale > 0 else torch.zeros_like(scale)
        sent = (draws() >> 9).float() * 2.0**-23 + 2.0**-24 < t.abs() * inverse
        return torch.where(t < 0, -1, 1) * sent + 1

    def read(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Scaled digits."""
        return (codes - 1).float() * scales[:, 0]
