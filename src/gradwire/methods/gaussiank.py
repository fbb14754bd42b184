"""Gaussian-k sparsification."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs.select import NormalTail
from gradwire.methods.criteria import ByFittedTail
from gradwire.methods.published import Published
from gradwire.methods.registry import register


@register("gaussiank")
@dataclass(frozen=True, kw_only=True)
class GaussianK(ByFittedTail):
    """About k of the largest magnitudes, by the threshold of a fitted normal distribution, with error feedback.

    The threshold is the quantile of a normal distribution with the values' root mean square. Where less than 2/3 of k
    exceed it, it is halved; where more than 4/3 do, it is multiplied by 1.5; twice at most. Magnitudes that are nearly
    alike have no tail: only the largest of a segment is sent, or all are asked for, of which a payload takes what it
    has room for.
    """

    citation = "Shi et al. 2019, arXiv:1911.08772"
    published = Published(
        "The paper takes 0.1 % (`ratio=0.001`). Its authors' code fits the mean as well, which is taken for 0 here."
    )

    def tail(self) -> NormalTail:
        """A normal one."""
        return NormalTail(self.ratio)
