"""What every choice of coordinates has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from torch import Tensor

from gradwire.errors import ConfigurationError
from gradwire.layout import Block, Int64Array
from gradwire.memory import Feedback
from gradwire.plain import Plain


class Selector(Plain, ABC):
    """Chooses coordinates of a block by looking at its values."""

    def at(self, step: int) -> Selector:
        """The selector as it is in one step; a schedule may change its ratio."""
        return self

    @abstractmethod
    def counts(self, block: Block) -> Int64Array:
        """How many coordinates of each segment are sent: ``int64[S]``, from the block alone."""

    @abstractmethod
    def select(
        self, block: Block, gradient: Tensor, feedback: Feedback, counts: Int64Array, positions: Tensor, values: Tensor
    ) -> None:
        """Compensates, then writes ascending positions and their values; the residual keeps all for now.

        Args:
            block: Which elements, in which segments.
            gradient: ``float32`` flat buffer.
            feedback: The memory's share.
            counts: As :meth:`counts` gave them.
            positions: ``int64[counts.sum()]``, to be filled.
            values: ``float32[counts.sum()]``, to be filled.
        """


def counts_for(block: Block, ratio: float) -> Int64Array:
    """:func:`count_for` each segment."""
    counts: Int64Array = np.maximum(1, np.rint(block.segment_numels * ratio)).astype(np.int64)
    return counts


def count_for(numel: int, ratio: float) -> int:
    """The nearest whole number to ``ratio`` times ``numel``, at least one."""
    return max(1, round(ratio * numel))


def check_ratio(ratio: float) -> None:
    """Raises ConfigurationError unless ``ratio`` is a share of the coordinates."""
    if not 0 < ratio <= 1:
        raise ConfigurationError(f"ratio={ratio!r} is out of range; choose 0 < ratio <= 1, for example 0.01 for 1 %")
