"""Sparsity that grows over the first steps."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs.select.top import TopMagnitudes
from gradwire.errors import ConfigurationError

STAGES = 4
"""Densities of 25 %, 6.25 %, 1.6 % and 0.4 %, as in the paper, before the last one."""


@dataclass(frozen=True)
class WarmUp(TopMagnitudes):
    """The top-k of each segment, with a density that falls to a quarter four times (Lin et al. 2018, section 3.3).

    Attributes:
        ratio: k as a share of the segment's elements once it is warm.
        steps: Steps until then; 0 for none.
    """

    steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 0:
            raise ConfigurationError(f"warmup={self.steps!r} is out of range; choose a number of steps >= 0")

    def at(self, step: int) -> TopMagnitudes:
        """Never sparser than it will be."""
        if step >= self.steps:
            return TopMagnitudes(self.ratio)
        return TopMagnitudes(max(self.ratio, 0.25 ** (1 + step * STAGES // self.steps)))
