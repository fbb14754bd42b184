"""Delay what is ambiguous: gradients are sent once they are large against their variance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gradwire.codecs import index
from gradwire.codecs.adaptive import AdaptiveSparse
from gradwire.codecs.index import IndexCoding
from gradwire.codecs.quantize import values
from gradwire.codecs.quantize.values import ValueCoding
from gradwire.codecs.select import Unambiguous
from gradwire.errors import ConfigurationError
from gradwire.methods.method import CodecMethod
from gradwire.methods.published import Published
from gradwire.methods.registry import register
from gradwire.methods.threshold import bound_of_a_subset

Moments = Literal["step", "microbatches", "samples"]


@register("variance")
@dataclass(frozen=True, kw_only=True)
class Variance(CodecMethod):
    """A coordinate's accumulated gradient r is sent when ``r**2 > alpha * v``, v being its accumulated squares.

    With the default ``moments="step"`` this is not the paper: there squares are of single samples, here a whole step
    then stands for one. ``preset="paper"``, or ``moments="samples"``, takes them from :class:`gradwire.SecondMoments`.

    Each step ``r += sum_z grad_z / B`` and ``v += sum_z (grad_z / B)**2`` over the mini-batch's samples z; what is sent
    starts again at r = v = 0, elsewhere ``v *= decay``. With ``moments="step"`` the first step sends nothing if alpha
    is 1 or more, since there ``r**2 = v``.

    Only the paper's abstract was at hand: the criterion, the decay, the defaults and values of 4 bits, powers of two
    below the largest of a tensor, are from memory. What these lose stays in the residual, whereas r = 0 drops it.

    Attributes:
        alpha: How unambiguous a coordinate must be, positive; 1 to 2 in the paper.
        decay: zeta, in (0, 1].
        moments: Where squares come from: ``"step"``, or ``"microbatches"`` or ``"samples"`` by SecondMoments.
        capacity: How many coordinates fit in the first step, as a share of each parameter, in (0, 1].
        values: How values are written: ``"exponent"``, ``"fp32"``, ``"fp16"``, ``"qsgd:4"``, or an object.
        indices: How indices are written, as for ``topk``.
    """

    citation = "Tsuzuku et al. 2018, arXiv:1802.06058"
    published = Published(
        "With the default a whole step stands for one sample, which is not the paper: its squares are of samples, "
        "and come from `gradwire.SecondMoments`.",
        {"moments": "samples"},
    )
    routes = ("gather",)
    memory = "residual"
    memories = ("none", "residual")
    bias = "biased"
    wire_bits = "64 + max(16, ceil(capacity * d)) * (4 + 2 + log2(1 / capacity))"

    alpha: float = 1.5
    decay: float = 0.999
    moments: Moments = "step"
    capacity: float = 0.02
    values: str | ValueCoding = "exponent"
    indices: str | IndexCoding = "elias-fano"

    def __post_init__(self) -> None:
        check_moments(self.moments)
        self.codec()

    def codec(self) -> AdaptiveSparse:
        """Criterion, capacity, value coding, index coding."""
        criterion = Unambiguous(self.alpha, self.decay, self.moments != "step")
        return AdaptiveSparse(criterion, self.capacity, values.parse(self.values), index.parse(self.indices))

    def error_bound(self, numel: int) -> float:
        """All may be ambiguous; none for values that are quantised."""
        return bound_of_a_subset(self.values)


def check_moments(moments: str) -> None:
    """Raises ConfigurationError unless squares can come from there."""
    if moments not in ("step", "microbatches", "samples"):
        raise ConfigurationError(f"moments={moments!r} is not known; choose 'step', 'microbatches' or 'samples'")
