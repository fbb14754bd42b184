"""Thresholds that are given, or a share of the largest magnitude."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.select.criterion import Choice, Criterion, Thresholds
from gradwire.errors import ConfigurationError
from gradwire.layout import Block, Float32Array, Float64Array
from gradwire.memory import Feedback

TINY, HUGE = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
"""Thresholds lie between these."""


@dataclass(frozen=True)
class Fixed(Criterion):
    """Magnitudes of at least a given one.

    Attributes:
        threshold: What a magnitude must reach.
    """

    threshold: float

    def __post_init__(self) -> None:
        check_threshold(self.threshold)

    def choose(self, block: Block, gradient: Tensor, feedback: Feedback, room: int, key: int) -> Choice:
        """One pass."""
        return _reaching(np.float32(self.threshold), block, gradient, feedback, room)


@dataclass(frozen=True)
class Steps(Criterion):
    """Magnitudes above a given one; each of them sends just that much of its value.

    Attributes:
        size: What a magnitude must exceed, and what is sent of it.
    """

    size: float

    def __post_init__(self) -> None:
        check_threshold(self.size)

    def choose(self, block: Block, gradient: Tensor, feedback: Feedback, room: int, key: int) -> Choice:
        """One pass, for the next larger number."""
        least = np.nextafter(np.float32(self.size), np.float32(np.inf))
        size = np.full(block.segment_count, self.size, dtype=np.float32)
        return replace(_reaching(least, block, gradient, feedback, room), magnitudes=size)


@dataclass(frozen=True)
class HalfMaximum(Thresholds):
    """Magnitudes of at least half the largest one of their segment."""

    def thresholds(self, block: Block, source: Tensor, totals: Float64Array, largest: Float32Array) -> Float32Array:
        """Half the largest, rounded up."""
        half = largest * np.float32(0.5)
        return np.where(half + half < largest, np.nextafter(half, largest), half)


def _reaching(least: np.float32, block: Block, gradient: Tensor, feedback: Feedback, room: int) -> Choice:
    """All magnitudes of at least this one."""
    thresholds = np.full(block.segment_count, least, dtype=np.float32)
    return Choice(*kernels.collect_reaching(block, feedback.source(gradient), thresholds, room))


def check_threshold(threshold: float, name: str = "threshold") -> None:
    """Raises ConfigurationError unless ``threshold`` is a positive float32."""
    if not TINY <= threshold <= HUGE:
        raise ConfigurationError(
            f"{name}={threshold!r} is out of range; choose a positive magnitude, such as 0.01, near the larger ones of "
            "your gradients"
        )
