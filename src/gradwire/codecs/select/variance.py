"""Coordinates whose gradient is large against its variance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.select.criterion import Choice, Criterion
from gradwire.codecs.select.thresholds import check_threshold
from gradwire.errors import ConfigurationError
from gradwire.layout import Block, Slot
from gradwire.memory import Feedback, Kind, Store

SQUARES = "squares"
"""The store's field for squares that are not those of the step's gradient."""

SECOND_MOMENTS = "second_moments"
"""The store's field for accumulated squares."""


@dataclass(frozen=True)
class Unambiguous(Criterion):
    """Coordinates with ``r**2 > alpha * v``, for accumulated values ``r`` and their accumulated squares ``v``.

    ``v`` starts anew where ``r`` is sent, and is multiplied by ``decay`` elsewhere. Where it is wanted but does not fit
    this step, both stay as they are.

    Attributes:
        alpha: How unambiguous a coordinate must be, positive.
        decay: zeta, in (0, 1].
        given: Whether squares come from outside, in the store's field :data:`SQUARES`; else they are those of the
            step's gradient.
        step: With it, ``|r|`` must exceed it, too, and one step is sent; then ``v`` loses what that step explains.
            0 for none.
        moments: ``v``, laid out as the gradient buffer; none are remembered if None.
        squares: Squares of this step that come from outside.
    """

    alpha: float
    decay: float
    given: bool = False
    step: float = 0.0
    moments: Tensor | None = None
    squares: Tensor | None = None

    def __post_init__(self) -> None:
        if not 0 < self.alpha < math.inf:
            raise ConfigurationError(f"alpha={self.alpha!r} is out of range; choose a positive number, usually 1 to 2")
        if not 0 < self.decay <= 1:
            raise ConfigurationError(f"decay={self.decay!r} is out of range; choose 0 < decay <= 1, usually 0.999")
        if self.step:
            check_threshold(self.step)

    def installed(self, store: Store, slots: Sequence[Slot], numel: int) -> Unambiguous:
        """With ``v``, and the squares from outside if there are any."""
        squares = store.flat(SQUARES, slots, numel, Kind.GIVEN) if self.given else None
        return replace(self, moments=store.flat(SECOND_MOMENTS, slots, numel), squares=squares)

    def choose(self, block: Block, gradient: Tensor, feedback: Feedback, room: int, key: int) -> Choice:
        """One pass over gradient, residual and ``v``."""
        moments = torch.zeros_like(gradient) if self.moments is None else self.moments
        positions, values, counts = kernels.collect_unambiguous(
            block,
            feedback.source(gradient),
            self.squares,
            moments,
            float(self.alpha),
            float(self.decay),
            float(self.step),
            room,
        )
        magnitudes = np.full(block.segment_count, self.step, dtype=np.float32) if self.step else None
        return Choice(positions, values, counts, magnitudes)

    def sent(self, block: Block, positions: Tensor, values: Tensor) -> None:
        """``v = 0``; with steps ``v = max(v - 2 |r| step + step**2, 0)``."""
        if self.moments is None:
            return
        left = torch.zeros_like(values)
        if self.step:
            kernels.gather(block, self.moments, positions, left)
            left = (left - 2 * self.step * values.abs() + self.step**2).clamp(min=0)
        kernels.scatter(block, self.moments, positions, left)
