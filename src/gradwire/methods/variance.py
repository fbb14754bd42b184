"""Delay what is ambiguous: gradients are sent once they are large against their variance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gradwire.codecs.quantize.values import ValueCoding
from gradwire.codecs.select import Unambiguous
from gradwire.errors import ConfigurationError
from gradwire.methods.criteria import ByCriterion
from gradwire.methods.published import Published
from gradwire.methods.registry import register

Moments = Literal["step", "microbatches", "samples"]


@register("variance")
@dataclass(frozen=True, kw_only=True)
class Variance(ByCriterion):
    """A coordinate's accumulated gradient r is sent when ``r**2 > alpha * v``, v being its accumulated squares.

    With the default ``moments="step"`` this is not the paper: there squares are of single samples, here a whole step
    then stands for one. ``preset="paper"``, or ``moments="samples"``, takes them from :class:`gradwire.SecondMoments`.

    Each step ``r += sum_z grad_z / B`` and ``v += sum_z (grad_z / B)**2`` over the mini-batch's samples z; what is sent
    starts again at r = v = 0, elsewhere ``v *= decay``. With ``moments="step"`` the first step sends nothing if alpha
    is 1 or more, since there ``r**2 = v``.

    Only the paper's abstract was at hand. The criterion, r = v = 0, the decay and both defaults are those of a reducer
    that others wrote into PowerSGD's framework; it divides squares by B only once, so that its alpha is B times as
    strict, and sends whole floats. Values of 4 bits, powers of two below the largest of a tensor, are from memory; what
    these lose stays in the residual, whereas r = 0 drops it.

    Attributes:
        alpha: How unambiguous a coordinate must be, positive; 1 to 2 in the paper.
        decay: zeta, in (0, 1].
        moments: Where squares come from: ``"step"``, or ``"microbatches"`` or ``"samples"`` by SecondMoments.
        values: How values are written: ``"exponent"``, ``"fp32"``, ``"fp16"``, ``"qsgd:4"``, or an object.
    """

    citation = "Tsuzuku et al. 2018, arXiv:1802.06058"
    published = Published(
        "With the default a whole step stands for one sample, which is not the paper: its squares are of samples, "
        "and come from `gradwire.SecondMoments`.",
        {"moments": "samples"},
    )
    memories = ("none", "residual")
    wire_bits = "64 + max(16, ceil(capacity * d)) * (4 + 2 + log2(1 / capacity))"

    alpha: float = 1.5
    decay: float = 0.999
    moments: Moments = "step"
    values: str | ValueCoding = "exponent"

    def __post_init__(self) -> None:
        check_moments(self.moments)
        self.codec()

    def criterion(self) -> Unambiguous:
        """Large against the variance."""
        return Unambiguous(self.alpha, self.decay, self.moments != "step")


def check_moments(moments: str) -> None:
    """Raises ConfigurationError unless squares can come from there."""
    if moments not in ("step", "microbatches", "samples"):
        raise ConfigurationError(f"moments={moments!r} is not known; choose 'step', 'microbatches' or 'samples'")
