"""The variance criterion with steps of one size."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs.select import Unambiguous
from gradwire.codecs.select.thresholds import check_threshold
from gradwire.methods.criteria import SignsByCriterion
from gradwire.methods.registry import register
from gradwire.methods.variance import Moments, Variance, check_moments


@register("hybrid")
@dataclass(frozen=True, kw_only=True)
class Hybrid(SignsByCriterion):
    """A coordinate sends one step of tau with its sign when ``|r| > tau`` and ``r**2 > alpha * v``.

    With the default ``moments="step"`` this is not the paper: see :class:`gradwire.methods.Variance`.

    Then r loses that step and ``v = max(v - 2 |r| tau + tau**2, 0)``; elsewhere ``v *= decay``. One bit a value, as in
    :class:`gradwire.methods.Strom`; r, v and ``moments`` as in :class:`gradwire.methods.Variance`. That the paper
    combines its method with Strom's was read in a summary by others; how is from memory, and no public code has it.

    Attributes:
        threshold: tau, positive, in units of the gradient, as for :class:`gradwire.methods.Strom`.
        alpha: How unambiguous a coordinate must be, positive.
        decay: zeta, in (0, 1].
        moments: Where squares come from: ``"step"``, or ``"microbatches"`` or ``"samples"`` by SecondMoments.
    """

    citation = "Tsuzuku et al. 2018, arXiv:1802.06058, with Strom 2015"
    published = Variance.published
    memories = ("none", "residual")

    threshold: float = 0.01
    alpha: float = 1.5
    decay: float = 0.999
    moments: Moments = "step"

    def __post_init__(self) -> None:
        check_threshold(self.threshold)
        check_moments(self.moments)
        self.codec()

    def criterion(self) -> Unambiguous:
        """Large against the variance, and against tau."""
        return Unambiguous(self.alpha, self.decay, self.moments != "step", self.threshold)

    def error_bound(self, numel: int) -> float:
        """A step towards a larger value leaves less of it, and all may be ambiguous."""
        return 1.0
