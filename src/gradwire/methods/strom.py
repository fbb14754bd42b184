"""Threshold quantisation: steps of one size, whenever enough has piled up."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs.select import Steps
from gradwire.methods.criteria import SignsByCriterion
from gradwire.methods.published import Published
from gradwire.methods.registry import register


@register("strom")
@dataclass(frozen=True, kw_only=True)
class Strom(SignsByCriterion):
    """Where the accumulated gradient exceeds tau, one step of tau with its sign; the rest accumulates on.

    A value takes one bit, and tau itself 4 bytes a segment. The paper was not at hand. That gradients add to a residual
    and what exceeds a threshold is sent is as in the author's patent, US 10152676; that a step is ``sign(r) tau`` and
    is taken from the residual as in LBANN's and MXNet's code, where equality counts, too. The word of 32 bits, index
    and sign together, as LBANN has it, is replaced by Elias-Fano indices.

    What is larger than tau in step after step piles up without end, as only tau of it is sent.

    Attributes:
        threshold: tau, positive, in units of the gradient; above what the largest coordinates are on average.
    """

    citation = "Strom 2015, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing, Interspeech"
    published = Published("Indices are Elias-Fano coded, and a payload has room for what the step before wanted.")
    memories = ("none", "residual", "momentum", "dgc", "lowpass")

    threshold: float = 0.01

    def criterion(self) -> Steps:
        """Steps of one size."""
        return Steps(self.threshold)

    def error_bound(self, numel: int) -> float:
        """A step towards a larger value leaves less of it, and all may lie below tau."""
        return 1.0
