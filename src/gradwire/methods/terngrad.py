"""TernGrad."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradwire.kernels import codes
from gradwire.methods.method import CodecMethod
from gradwire.methods.registry import register
from gradwire.quantize import Quantiser


@register("terngrad")
@dataclass(frozen=True, kw_only=True)
class TernGrad(CodecMethod):
    """Zero or plus or minus the largest magnitude of a segment, drawn so that nothing is biased.

    Attributes:
        clip: Standard deviations to which a segment is clipped first: 2.5 in the paper's experiments, at the price of a
            bias; 0 for none, as in its analysis.
    """

    citation = "Wen et al. 2017, arXiv:1705.07878"
    routes = ("sharded", "gather")
    bias = "unbiased"
    wire_bits = "8 * ceil(d / 5) + 32"

    clip: float = 0.0

    def __post_init__(self) -> None:
        self.codec()

    def codec(self) -> Quantiser:
        """Five trits a byte."""
        return Quantiser(codes.TernGrad(self.clip))

    def error_bound(self, numel: int) -> float:
        """``s |x|_1 / |x|^2 - 1``, largest for one value among ``d - 1`` of about ``1 / sqrt(d)`` of it."""
        return (math.sqrt(numel) - 1) / 2
