"""NUQSGD."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs.quantize import Quantiser
from gradwire.kernels import codes
from gradwire.methods.method import CodecMethod, there_and_back
from gradwire.methods.published import Published
from gradwire.methods.registry import register


@register("nuqsgd")
@dataclass(frozen=True, kw_only=True)
class NUQSGD(CodecMethod):
    """QSGD with levels at powers of two, finer where most values are.

    On the sharded route owners of averages write twice the bits, at most 8, in QSGD's levels.

    Attributes:
        bits: Bits a value with its sign: 2, 4 or 8.
    """

    published = Published("Elias coding is not here.", {"route": "gather"})
    citation = "Ramezani-Kebrya et al. 2021, arXiv:2104.13818"
    routes = ("sharded", "gather")
    granularities = ("block:512", "layer", "bucket", "model")
    bias = "unbiased"
    wire_bits = "(bits + min(8, 2 * bits)) * d + 64 * ceil(d / 512)"

    bits: int = 4

    def __post_init__(self) -> None:
        self.codec()

    def codec(self) -> Quantiser:
        """Zero and powers of two of a segment's norm."""
        return Quantiser(codes.NUQSGD(self.bits))

    def owner_codec(self, route: str) -> Quantiser | None:
        """QSGD's levels in twice the bits."""
        return Quantiser(codes.QSGD(min(8, 2 * self.bits))) if route == "sharded" else None

    def error_bound(self, numel: int) -> float:
        """The workers' and the owners' levels."""
        owner = codes.QSGD(min(8, 2 * self.bits)).error_bound(numel)
        return there_and_back(self.worker_bound(numel), owner)

    def worker_bound(self, numel: int) -> float:
        """An eighth between powers of two, and what is below the smallest."""
        return codes.NUQSGD(self.bits).error_bound(numel)
