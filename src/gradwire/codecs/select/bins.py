"""Coordinates that stand out among their neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.select.criterion import Choice, Criterion
from gradwire.errors import ConfigurationError
from gradwire.layout import Block
from gradwire.memory import Feedback

CONVOLUTION, OTHER = 50, 500
"""Elements of a bin: in kernels of a convolution, and in all other parameters."""


@dataclass(frozen=True)
class LocalMaxima(Criterion):
    """Coordinates that would be the largest of their bin if the latest gradient came once more.

    What is sent of each is its sign, at the mean of the bins' largest magnitudes.

    Attributes:
        width: Consecutive elements of a parameter that form a bin; None for :data:`CONVOLUTION` in parameters of three
            dimensions or more and :data:`OTHER` in all others.
    """

    width: int | None = None

    def __post_init__(self) -> None:
        if self.width is not None and self.width < 1:
            raise ConfigurationError(
                f"bin={self.width!r} is out of range; choose at least 1 element, or None for {CONVOLUTION} in "
                f"convolutions and {OTHER} elsewhere"
            )

    def choose(self, block: Block, gradient: Tensor, feedback: Feedback, room: int, key: int) -> Choice:
        """One pass."""
        of_slot = [self.width or (CONVOLUTION if len(slot.shape) > 2 else OTHER) for slot in block.slots]
        bins = np.array(of_slot, dtype=np.int64)[block.slot_of_run]
        positions, values, counts, scales = kernels.collect_local_maxima(block, feedback.source(gradient), bins, room)
        return Choice(positions, values, counts, scales)
