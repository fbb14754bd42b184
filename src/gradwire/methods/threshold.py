"""Threshold sparsification."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs.select import Fixed
from gradwire.methods.criteria import ByCriterion
from gradwire.methods.published import Published
from gradwire.methods.registry import register


@register("threshold")
@dataclass(frozen=True, kw_only=True)
class Threshold(ByCriterion):
    """Every value whose magnitude is at least ``v``, with error feedback.

    How many these are follows training: the same threshold sends less and less as gradients shrink. The layer-wise
    study has it without a memory; that, and that equality counts, are as in its public code.

    Attributes:
        threshold: v, positive, in units of the gradient.
    """

    citation = "Dutta et al. 2020, arXiv:1911.08250 (Threshold-v); Aji & Heafield 2017, arXiv:1704.05021"
    published = Published("The layer-wise study has no feedback; Aji & Heafield have.", {"memory": "none"})
    memories = ("none", "residual", "momentum", "dgc", "lowpass")

    threshold: float = 0.01

    def criterion(self) -> Fixed:
        """One threshold."""
        return Fixed(self.threshold)
