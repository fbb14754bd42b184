"""EF-SignSGD."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.kernels import codes
from gradwire.methods.method import CodecMethod
from gradwire.methods.registry import register
from gradwire.quantize import Quantiser


@register("efsignsgd")
@dataclass(frozen=True, kw_only=True)
class EFSignSGD(CodecMethod):
    """Signs scaled by the mean magnitude, with error feedback: ``(|p|_1 / d) sign(p)``, ``p = g + e``.

    On the sharded route each owner compresses its average with an error feedback of its own, as in Zheng et al. 2019,
    arXiv:1905.10936, so both directions cost one bit a value.
    """

    citation = "Karimireddy et al. 2019, arXiv:1901.09847"
    routes = ("sharded", "gather")
    memory = "residual"
    bias = "contractive"
    wire_bits = "d + 32"

    def error_bound(self, numel: int) -> float:
        """``1 - |x|_1^2 / (d |x|_2^2)``, which is largest for a lone value."""
        return 1 - 1 / numel

    def codec(self) -> Quantiser:
        """One bit a value, one scale a segment."""
        return Quantiser(codes.Sign())
