"""What encoders take."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Compensated(NamedTuple):
    """``t = beta * residual + gamma * gradient``, which kernels form as they go; without a residual the gradient.

    Attributes:
        gradient: ``float32`` flat buffer.
        residual: Laid out alike: left with what is not sent; or None.
        beta: Weight of the residual.
        gamma: Weight of the gradient.
    """

    gradient: Tensor
    residual: Tensor | None = None
    beta: float = 1.0
    gamma: float = 1.0
