"""Natural compression."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs.quantize import BUCKET, Quantiser
from gradwire.kernels import codes
from gradwire.methods.method import CodecMethod, there_and_back
from gradwire.methods.published import Published
from gradwire.methods.registry import register


@register("natural")
@dataclass(frozen=True, kw_only=True)
class Natural(CodecMethod):
    """Sign and a power of two, rounded stochastically: unbiased, and never far off.

    The paper compresses averages in the same way, ``owner="natural:8"``. Then the way back adds all the noise of one
    worker's rounding, whatever their number; so here owners of averages take 8-bit levels instead, of as many bytes.

    Attributes:
        bits: 8, with 127 exponents below the largest of a segment, or 9, with all exponents of float32.
    """

    citation = "Horvath et al. 2019, arXiv:1905.10988"
    published = Published(
        "Eight bits have all exponents that matter; 8-bit levels on the way back let noise fall with n.",
        {"bits": 9, "owner": "natural"},
    )
    routes = ("sharded", "gather")
    bias = "unbiased"
    wire_bits = "(bits + 8) * d + 32 * (bits == 8) + 32 * ceil(d / 512)"

    bits: int = 8

    def __post_init__(self) -> None:
        self.codec()

    def codec(self) -> Quantiser:
        """Exponents and signs."""
        return Quantiser(codes.Natural(self.bits))

    def owner_codec(self, route: str) -> Quantiser | None:
        """Eight bits."""
        return Quantiser(codes.QSGD(8), BUCKET) if route == "sharded" else None

    def error_bound(self, numel: int) -> float:
        """The workers' powers of two and the owners' levels."""
        return there_and_back(self.worker_bound(numel), codes.QSGD(8).error_bound(min(numel, BUCKET)))

    def worker_bound(self, numel: int) -> float:
        """An eighth: the worst is a value half-way between two powers."""
        return 1 / 8
