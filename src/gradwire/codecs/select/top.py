"""The largest magnitudes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradwire import kernels
from gradwire.codecs.select.selector import Selector, check_ratio, counts_for
from gradwire.layout import Block, Int64Array
from gradwire.memory import Feedback


@dataclass(frozen=True)
class TopMagnitudes(Selector):
    """The exact top-k of each segment by magnitude; ties go to the lowest position.

    Attributes:
        ratio: k as a share of the segment's elements, in (0, 1].
    """

    ratio: float

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def counts(self, block: Block) -> Int64Array:
        """``ratio`` of each segment."""
        return counts_for(block, self.ratio)

    def select(
        self, block: Block, gradient: Tensor, feedback: Feedback, counts: Int64Array, positions: Tensor, values: Tensor
    ) -> None:
        """Radix selection, one pass to compensate and count, one to collect."""
        kernels.topk_select(block, feedback.source(gradient), counts, positions, values)
