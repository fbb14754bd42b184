"""1-bit SGD."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs.quantize import Quantiser
from gradwire.kernels import codes
from gradwire.methods.method import CodecMethod
from gradwire.methods.published import Published
from gradwire.methods.registry import register


@register("onebit")
@dataclass(frozen=True, kw_only=True)
class OneBit(CodecMethod):
    """One bit a value and the mean of each side, with error feedback on the way to the owner and back.

    The paper has a pair of means for every column of a weight matrix, there ``W^T x``, so for the weights of a unit:
    ``granularity="row"``. It diverges without the memory. Its authors' code, CNTK's ``ColumnQuantizer`` and
    ``AllReduceDistGradAggregator``, agrees: zero counts as positive, means are of each side, workers and owners have
    memories, and one's own share is quantised, too. Its columns are of ``W x``, so of the weights that leave an input.
    """

    citation = "Seide et al. 2014, 1-Bit Stochastic Gradient Descent, Interspeech"
    published = Published(
        "A pair of means for every unit costs 64 bits each way, which short rows feel.", {"granularity": "row"}
    )
    routes = ("sharded", "gather")
    memory = "residual"
    bias = "contractive"
    wire_bits = "2 * (d + 64)"

    def codec(self) -> Quantiser:
        """One bit a value, two values a segment."""
        return Quantiser(codes.OneBit())

    def error_bound(self, numel: int) -> float:
        """``1 - (a m+^2 + b m-^2) / |x|^2`` with a and b values on either side: largest for a lone value."""
        return 1 - 1 / numel
