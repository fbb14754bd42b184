"""Thresholds that are given, or a share of the largest magnitude."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from gradwire.errors import ConfigurationError
from gradwire.layout import Block, Float32Array, Float64Array
from gradwire.select.criterion import Thresholds

TINY, HUGE = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
"""Thresholds lie between these."""


@dataclass(frozen=True)
class Fixed(Thresholds):
    """Magnitudes of at least a given one.

    Attributes:
        threshold: What a magnitude must reach.
    """

    threshold: float

    def __post_init__(self) -> None:
        check_threshold(self.threshold)

    def thresholds(self, block: Block, source: Tensor, totals: Float64Array, largest: Float32Array) -> Float32Array:
        """The same everywhere."""
        return np.full(len(largest), self.threshold, dtype=np.float32)


@dataclass(frozen=True)
class Steps(Thresholds):
    """Magnitudes above a given one; each of them sends just that much of its value.

    Attributes:
        size: What a magnitude must exceed, and what is sent of it.
    """

    size: float

    def __post_init__(self) -> None:
        check_threshold(self.size)

    def thresholds(self, block: Block, source: Tensor, totals: Float64Array, largest: Float32Array) -> Float32Array:
        """The next larger number."""
        return np.full(len(largest), np.nextafter(np.float32(self.size), np.float32(np.inf)), dtype=np.float32)

    def magnitudes(self, block: Block) -> Float32Array:
        """One step."""
        return np.full(block.segment_count, self.size, dtype=np.float32)


@dataclass(frozen=True)
class HalfMaximum(Thresholds):
    """Magnitudes of at least half the largest one of their segment."""

    def thresholds(self, block: Block, source: Tensor, totals: Float64Array, largest: Float32Array) -> Float32Array:
        """Half the largest, rounded up."""
        half = largest * np.float32(0.5)
        return np.where(half + half < largest, np.nextafter(half, largest), half)


def check_threshold(threshold: float, name: str = "threshold") -> None:
    """Raises ConfigurationError unless ``threshold`` is a positive float32."""
    if not TINY <= threshold <= HUGE:
        raise ConfigurationError(
            f"{name}={threshold!r} is out of range; choose a positive magnitude, such as 0.01, near the larger ones of "
            "your gradients"
        )
