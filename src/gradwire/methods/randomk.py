"""Random-k sparsification."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs.select import SharedRandom, count_for
from gradwire.methods.method import LinearMethod
from gradwire.methods.published import Published
from gradwire.methods.registry import register


@register("randomk")
@dataclass(frozen=True, kw_only=True)
class RandomK(LinearMethod):
    """k coordinates of each segment that all ranks draw alike: values all-reduce and no index travels.

    With ``memory="none"`` or ``"diana"`` values are scaled by d / k, which makes the average unbiased.

    Attributes:
        ratio: k as a share of a segment's elements, in (0, 1].
    """

    citation = "Stich et al. 2018, arXiv:1809.07599; shared seed as in Vogels et al. 2019, arXiv:1905.13727"
    published = Published(
        "All workers draw the same coordinates, so that values all-reduce; in the paper each draws its own."
    )
    memory = "residual"
    bias = "unbiased"
    wire_bits = "32 * k"

    ratio: float = 0.01

    def __post_init__(self) -> None:
        self.codec()

    def codec(self) -> SharedRandom:
        """The shared choice."""
        return SharedRandom(self.ratio)

    def error_bound(self, numel: int) -> float:
        """``d / k - 1``."""
        return numel / count_for(numel, self.ratio) - 1
