"""Sparsification by a threshold that is estimated, not searched."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs.select import ExponentialTail
from gradwire.methods.criteria import ByFittedTail
from gradwire.methods.published import Published
from gradwire.methods.registry import register


@register("sidco")
@dataclass(frozen=True, kw_only=True)
class SIDCo(ByFittedTail):
    """About k of the largest magnitudes, by the threshold of a fitted exponential distribution, with error feedback.

    The double-exponential variant. Every 5 steps the number of stages goes up or down by one if the counts were off by
    more than 20 %; the first stage aims at a quarter. These numbers, and that stages share what is left evenly, are
    those of the authors' public code. A later stage fits from the threshold before it, not from the smallest magnitude
    that exceeds it. Stages are counted for each parameter, not for all together, and every rank counts its own.

    With tails heavier than exponential one stage sends too many, which fewer stages cannot mend. Where no number of
    stages comes within the 20 %, the rule goes back and forth between two: on the demo's CNN at 1 %, five steps of
    three stages (1.25 %) took turns with five of two (under 0.1 %). Magnitudes that are nearly alike have no tail: only
    the largest of a segment is sent in a step, until about half of them have been.
    """

    citation = "Abdelmoniem et al. 2021, arXiv:2101.10761"
    published = Published("Of the three fitted distributions the exponential one is here.")

    def tail(self) -> ExponentialTail:
        """An exponential one."""
        return ExponentialTail(self.ratio)
