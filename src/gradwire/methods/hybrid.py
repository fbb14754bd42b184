"""The variance criterion with steps of one size."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs import index
from gradwire.codecs.adaptive import AdaptiveSparse
from gradwire.codecs.index import IndexCoding
from gradwire.codecs.quantize import Quantiser
from gradwire.codecs.quantize.values import CodedValues
from gradwire.codecs.select import Unambiguous
from gradwire.codecs.select.thresholds import check_threshold
from gradwire.kernels import codes
from gradwire.methods.method import CodecMethod
from gradwire.methods.published import Published
from gradwire.methods.registry import register
from gradwire.methods.variance import Moments, check_moments


@register("hybrid")
@dataclass(frozen=True, kw_only=True)
class Hybrid(CodecMethod):
    """A coordinate sends one step of tau with its sign when ``|r| > tau`` and ``r**2 > alpha * v``.

    With the default ``moments="step"`` this is not the paper: see :class:`gradwire.methods.Variance`.

    Then r loses that step and ``v = max(v - 2 |r| tau + tau**2, 0)``; elsewhere ``v *= decay``. One bit a value, as in
    :class:`gradwire.methods.Strom`; r, v and ``moments`` as in :class:`gradwire.methods.Variance`. That the paper
    combines its method with Strom's was read in a summary by others; how is from memory.

    Attributes:
        threshold: tau, positive, in units of the gradient.
        alpha: How unambiguous a coordinate must be, positive.
        decay: zeta, in (0, 1].
        moments: Where squares come from: ``"step"``, or ``"microbatches"`` or ``"samples"`` by SecondMoments.
        capacity: How many coordinates fit in the first step, as a share of each parameter, in (0, 1].
        indices: How indices are written, as for ``topk``.
    """

    citation = "Tsuzuku et al. 2018, arXiv:1802.06058, with Strom 2015"
    published = Published(
        "With the default a whole step stands for one sample, which is not the paper: its squares are of samples, "
        "and come from `gradwire.SecondMoments`.",
        {"moments": "samples"},
    )
    routes = ("gather",)
    memory = "residual"
    memories = ("none", "residual")
    bias = "biased"
    wire_bits = "64 + max(16, ceil(capacity * d)) * (1 + 2 + log2(1 / capacity))"

    threshold: float = 0.01
    alpha: float = 1.5
    decay: float = 0.999
    moments: Moments = "step"
    capacity: float = 0.02
    indices: str | IndexCoding = "elias-fano"

    def __post_init__(self) -> None:
        check_threshold(self.threshold)
        check_moments(self.moments)
        self.codec()

    def codec(self) -> AdaptiveSparse:
        """Criterion, capacity, value coding, index coding."""
        criterion = Unambiguous(self.alpha, self.decay, self.moments != "step", self.threshold)
        return AdaptiveSparse(criterion, self.capacity, CodedValues(Quantiser(codes.Sign())), index.parse(self.indices))

    def error_bound(self, numel: int) -> float:
        """A step towards a larger value leaves less of it, and all may be ambiguous."""
        return 1.0
