"""8-bit gradients of a dynamic tree."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs.quantize import Quantiser
from gradwire.kernels import codes
from gradwire.methods.method import CodecMethod
from gradwire.methods.registry import register


@register("eightbit")
@dataclass(frozen=True, kw_only=True)
class EightBit(CodecMethod):
    """Eight bits a value, of which small values spend more on their exponent and large ones on their digits."""

    citation = "Dettmers 2016, arXiv:1511.04561"
    routes = ("sharded", "gather")
    bias = "contractive"
    wire_bits = "2 * (8 * d + 32)"

    def codec(self) -> Quantiser:
        """The nearest entry of the tree, times the largest magnitude of a segment."""
        return Quantiser(codes.Dynamic())

    def error_bound(self, numel: int) -> float:
        """The nearest entry is never worse than zero, which is one of them."""
        return 1.0
