"""TernGrad."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from gradwire.codecs.quantize import BUCKET, Quantiser
from gradwire.kernels import codes
from gradwire.layout import Block
from gradwire.methods.method import CodecMethod, CodecState, Context, there_and_back
from gradwire.methods.published import Published
from gradwire.methods.registry import register
from gradwire.routes import Operator, Route, SharedLevels, integer
from gradwire.wire.requests import Synchronization


@register("terngrad")
@dataclass(frozen=True, kw_only=True)
class TernGrad(CodecMethod):
    """Zero or plus or minus the largest magnitude of a segment, drawn so that nothing is biased.

    On the all-reduce route workers share the largest scale of all of them, so that three values become integers whose
    sums travel, as in the paper. Sums take 4 bits for up to 7 workers and 8 for up to 127, there and back: of 4,096
    normal values 4 workers send 1.4 times the bytes of the sharded route and have 1.3 times its noise, 16 workers 2.7
    and 1.7 times, since an owner's share has a scale of its own. It is for networks that add integers on the way.

    On the sharded route owners of averages round them to 4 bits, which adds 0.035 of a normal gradient's square where n
    workers leave about 2 / n; beyond 64 workers take ``owner="qsgd:8"``. Three values for averages, too, would add as
    much as one worker.

    Attributes:
        clip: Standard deviations to which a segment is clipped first: 2.5 in the paper's experiments, at the price of a
            bias; 0 for none, as in its analysis.
    """

    citation = "Wen et al. 2017, arXiv:1705.07878"
    published = Published(
        "Clipping brings a bias, and sums of integers take more bits than the paper's `log2(2 n + 1)`, 4 or 8, there "
        "and back. For ImageNet the authors' scripts leave the last layer alone: name it `dense` by pattern.",
        {"clip": 2.5, "route": "allreduce"},
    )
    routes = ("sharded", "gather", "allreduce")
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

    def init(self, context: Context) -> CodecState:
        """Sets up the memories.

        Raises:
            ConfigurationError: If the sums of so many workers do not fit 8 bits.
        """
        if context.route == "allreduce":
            self._shared(context.world_size).levels_for(context.world_size)
        return super().init(context)

    def way(self, route: str) -> Route:
        """Also the sums of integers."""
        return self._added if route == "allreduce" else super().way(route)

    def _added(
        self, worker: Operator, owner: Operator | None, block: Block, gradient: Tensor, workers: int
    ) -> Synchronization:
        return integer(self._shared(workers), block, gradient, worker.feedback, worker.key, workers)

    def _shared(self, workers: int) -> SharedLevels:
        return SharedLevels(2 if workers < 2 else 4 if workers < 8 else 8, 1, self.clip)

    def error_bound(self, numel: int) -> float:
        """The workers' three values and the owners' levels."""
        return there_and_back(self.worker_bound(numel), codes.QSGD(4).error_bound(min(numel, BUCKET)))

    def worker_bound(self, numel: int) -> float:
        """``s |x|_1 / |x|^2 - 1``, largest for one value among ``d - 1`` of ``1 / sqrt(d)`` of it."""
        return (math.sqrt(numel) - 1) / 2
