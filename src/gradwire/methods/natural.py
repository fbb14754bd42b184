"""Natural compression."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.kernels import codes
from gradwire.methods.method import CodecMethod
from gradwire.methods.registry import register
from gradwire.quantize import Quantiser


@register("natural")
@dataclass(frozen=True, kw_only=True)
class Natural(CodecMethod):
    """Sign and a power of two, rounded stochastically: unbiased, and never far off.

    Attributes:
        bits: 8, with 127 exponents below the largest of a segment, or 9, with all exponents of float32.
    """

    citation = "Horvath et al. 2019, arXiv:1905.10988"
    routes = ("sharded", "gather")
    bias = "unbiased"
    wire_bits = "bits * d + 32 * (bits == 8)"

    bits: int = 8

    def __post_init__(self) -> None:
        self.codec()

    def codec(self) -> Quantiser:
        """Exponents and signs."""
        return Quantiser(codes.Natural(self.bits))

    def error_bound(self, numel: int) -> float:
        """An eighth: the worst is a value half-way between two powers."""
        return 1 / 8
