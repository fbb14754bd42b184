"""Residuals that stand out in small bins."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradwire.codecs.select import LocalMaxima
from gradwire.methods.criteria import SignsByCriterion
from gradwire.methods.published import Published
from gradwire.methods.registry import register


@register("adacomp")
@dataclass(frozen=True, kw_only=True)
class AdaComp(SignsByCriterion):
    """Of each bin, what would reach the bin's largest residual if the latest gradient came once more.

    With ``G = residual + g`` and ``H = G + g`` a coordinate is sent if ``|H|`` is at least the largest ``|G|`` of its
    bin; how many these are adapts by itself. Each goes as the sign of G, at a scale that is the mean over the segment's
    bins of that largest ``|G|``; what is left stays.

    Of the paper only the abstract was at hand. The authors' patent, US 11295208, has bins of one size, the largest of
    each and one scale for a mini-batch; GradComp, by others, has the same test, but one bin, and sends H in full. The
    widths of bins and that the scale is a mean are from memory. Runs of zeros are not sent. Indices are Elias-Fano
    instead of the paper's 8 or 16 bits within a bin.

    Attributes:
        bin: Consecutive elements of a parameter that form a bin; None for 50 in parameters of three dimensions or more
            (kernels of convolutions) and 500 in all others.
    """

    citation = "Chen et al. 2018, arXiv:1712.02679"
    published = Published("Indices are Elias-Fano coded, and a payload has room for what the step before wanted.")
    memories = ("none", "residual")

    bin: int | None = None

    def criterion(self) -> LocalMaxima:
        """By bins."""
        return LocalMaxima(self.bin)

    def error_bound(self, numel: int) -> float:
        """One scale for bins of different sizes may exceed small values by far."""
        return math.inf
