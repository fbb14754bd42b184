"""The largest magnitudes among positive and among negative values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.layout import Block, Int64Array
from gradwire.memory import Feedback
from gradwire.select.selector import Selector, check_ratio, counts_for

SMALLEST = np.float32(2**-149)
"""The smallest positive float32."""


@dataclass(frozen=True)
class EitherSide(Selector):
    """The same share of the positive and of the negative values of each segment, the largest of each side.

    Together they are as many as the ratio asks for; where there are fewer that are not zero, zeros make up the number.

    Attributes:
        ratio: The share, in (0, 1].
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
        """Exact top-k of each side, over copies that hold that side alone."""
        kernel = kernels.for_device(gradient.device)
        _, largest = kernel.magnitude_statistics(block, gradient, feedback.residual, feedback.beta, feedback.gamma)
        finite = ~np.isnan(largest)
        source = feedback.buffer(gradient)
        if not finite.all():
            source = source.nan_to_num(0.0)
        sides = [source.clamp(min=0), (-source).clamp_(min=0)]
        any_at_all = np.full(len(counts), SMALLEST)
        above, below = (kernel.exceedances(block, side, any_at_all)[0] for side in sides)
        of_sides = _split(counts, above, below)
        if of_sides[2].any():
            sides.append((source == 0).float())
        chosen = [_top(block, side, wanted) for side, wanted in zip(sides, of_sides, strict=False)]
        positions.copy_(torch.cat(chosen).sort().values)
        kernel.gather(block, source, positions, values)
        if not finite.all():
            values[torch.from_numpy(np.repeat(~finite, counts)).to(values.device)] = torch.nan


def _split(counts: Int64Array, above: Int64Array, below: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """How many positive, negative and zero values of each segment to choose."""
    either = above + below
    wanted = np.minimum(counts, either)
    positive = np.rint(wanted * (above / np.maximum(either, 1))).astype(np.int64)
    positive = np.clip(positive, wanted - below, np.minimum(above, wanted))
    return positive, wanted - positive, counts - wanted


def _top(block: Block, side: Tensor, counts: Int64Array) -> Tensor:
    positions = torch.empty(int(counts.sum()), dtype=torch.int64, device=side.device)
    values = torch.empty(positions.shape, dtype=torch.float32, device=side.device)
    kernels.for_device(side.device).topk_select(block, side, None, 1.0, 1.0, counts, positions, values)
    return positions
