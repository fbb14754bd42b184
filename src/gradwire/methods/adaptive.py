"""The layer-wise study's adaptive threshold."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs.select import HalfMaximum
from gradwire.methods.criteria import ByCriterion
from gradwire.methods.published import Published
from gradwire.methods.registry import register


@register("adaptive")
@dataclass(frozen=True, kw_only=True)
class Adaptive(ByCriterion):
    """Every value whose magnitude, doubled, is at least the largest of its segment.

    AdaComp's test with one bin a segment and without a residual, so that the latest gradient is all there is; that, and
    that values go unquantised, are as in the study's public code. One outlier keeps everything else back: the largest
    is always sent, and it alone if it is twice as large as the next. With a memory, the test is of compensated values.
    """

    citation = "Dutta et al. 2020, arXiv:1911.08250 (Adaptive threshold), after Chen et al. 2018, arXiv:1712.02679"
    published = Published("A payload has room for what the step before wanted.")
    memory = "none"
    bias = "contractive"

    def criterion(self) -> HalfMaximum:
        """Half of each segment's largest."""
        return HalfMaximum()

    def error_bound(self, numel: int) -> float:
        """The largest magnitude goes, so at most ``1 - 1 / d`` stays; no bound for values that are quantised."""
        return super().error_bound(numel) * (1 - 1 / numel)
