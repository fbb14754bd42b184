"""Coordinates that are drawn in proportion to their magnitudes, which leaves no bias."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.select.criterion import Choice, Thresholds
from gradwire.codecs.select.selector import check_ratio, counts_for
from gradwire.codecs.select.thresholds import HUGE, TINY
from gradwire.errors import ConfigurationError
from gradwire.layout import Block, Float32Array, Float64Array
from gradwire.memory import Feedback

DEVIATIONS = 6
"""How far above the expected number of coordinates a payload has room, in standard deviations."""


@dataclass(frozen=True)
class Proportional(Thresholds):
    """Each magnitude m with probability ``min(m / T, 1)``, and as T if it is smaller: on average, itself.

    The first T is a segment's sum of magnitudes over k. Magnitudes that reach it are sent for certain, and each round
    shares what they leave of k among the others: ``T = (sum of those below T) / (k - number of those that reach T)``.

    Attributes:
        ratio: k as a share of a segment's elements, in (0, 1].
        rounds: How often.
    """

    ratio: float
    rounds: int

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        if self.rounds < 0:
            raise ConfigurationError(f"rounds={self.rounds!r} is out of range; choose 0 or more; the paper takes 2")

    def enough(self, block: Block) -> int:
        """The sum of all k, and some standard deviations of a number drawn."""
        expected = int(counts_for(block, self.ratio).sum())
        return min(block.numel, expected + math.ceil(DEVIATIONS * math.sqrt(expected)) + DEVIATIONS)

    def choose(self, block: Block, gradient: Tensor, feedback: Feedback, room: int, key: int) -> Choice:
        """Passes to measure, one to collect."""
        thresholds, source = self.measured(block, gradient, feedback)
        return Choice(*kernels.collect_drawn(block, kernels.Compensated(source), thresholds, room, key), thresholds)

    def sends(self, values: Tensor, magnitudes: Tensor) -> Tensor:
        """Nothing below the segment's threshold."""
        return torch.copysign(torch.maximum(values.abs(), magnitudes), values)

    def thresholds(self, block: Block, source: Tensor, totals: Float64Array, largest: Float32Array) -> Float32Array:
        """A pass a round."""
        wanted = counts_for(block, self.ratio)
        thresholds = (totals / wanted).clip(TINY, HUGE).astype(np.float32)
        for _ in range(self.rounds):
            counts, sums = kernels.exceedances(block, source, thresholds)
            left = np.maximum(wanted - counts, 1)
            lower = ((totals - sums) / left).clip(TINY, HUGE).astype(np.float32)
            thresholds = np.where(counts < wanted, np.minimum(lower, thresholds), thresholds)
        return thresholds
