"""TernGrad."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradwire.codecs.quantize import BUCKET, Quantiser
from gradwire.kernels import codes
from gradwire.methods.method import CodecMethod, there_and_back
from gradwire.methods.published import Published
from gradwire.methods.registry import register


@register("terngrad")
@dataclass(frozen=True, kw_only=True)
class TernGrad(CodecMethod):
    """Zero or plus or minus the largest magnitude of a segment, drawn so that nothing is biased.

    The paper's server sends averages of n workers' values as they are, so that noise falls with n. On the sharded route
    owners of averages round them to 4 bits, which adds 0.035 of a normal gradient's square where n workers leave about
    2 / n; beyond 64 workers take ``owner="qsgd:8"``. Three values for averages, too, would add as much as one worker.

    Attributes:
        clip: Standard deviations to which a segment is clipped first: 2.5 in the paper's experiments, at the price of a
            bias; 0 for none, as in its analysis.
    """

    citation = "Wen et al. 2017, arXiv:1705.07878"
    published = Published(
        "Clipping brings a bias, and gathering costs about n / 3 times as much at n workers. A scale that all workers "
        "share is not here.",
        {"clip": 2.5, "route": "gather"},
    )
    routes = ("sharded", "gather")
    bias = "unbiased"
    wire_bits = "8 * ceil(d / 5) + 32 + 4 * d + 32 * ceil(d / 512)"

    clip: float = 0.0

    def __post_init__(self) -> None:
        self.codec()

    def codec(self) -> Quantiser:
        """Five trits a byte."""
        return Quantiser(codes.TernGrad(self.clip))

    def owner_codec(self, route: str) -> Quantiser | None:
        """Four bits."""
        return Quantiser(codes.QSGD(4), BUCKET) if route == "sharded" else None

    def error_bound(self, numel: int) -> float:
        """The workers' three values and the owners' levels."""
        return there_and_back(self.worker_bound(numel), codes.QSGD(4).error_bound(min(numel, BUCKET)))

    def worker_bound(self, numel: int) -> float:
        """``s |x|_1 / |x|^2 - 1``, largest for one value among ``d - 1`` of ``1 / sqrt(d)`` of it."""
        return (math.sqrt(numel) - 1) / 2
