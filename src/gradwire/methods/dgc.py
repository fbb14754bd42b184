"""Deep Gradient Compression."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs import index
from gradwire.codecs.index import IndexCoding
from gradwire.codecs.quantize import values
from gradwire.codecs.quantize.values import ValueCoding
from gradwire.codecs.select import WarmUp, count_for
from gradwire.codecs.sparse import Sparse
from gradwire.methods.method import CodecMethod
from gradwire.methods.published import Published
from gradwire.methods.registry import register


@register("dgc")
@dataclass(frozen=True, kw_only=True)
class DGC(CodecMethod):
    """Top-k of a momentum that waits for what was not sent, forgotten where it was: for an optimizer without one.

    Momentum correction, masking and local gradient clipping are the memory ``"dgc"``, whose weights
    ``memory=gradwire.memory.MaskedMomentum(nesterov=True, clip=0.25)`` changes. The paper estimates the k-th magnitude
    from a sample and sends between 0.8 and 1.3 k; here the top-k is exact.

    Attributes:
        ratio: k as a share of a segment's elements, in (0, 1].
        warmup: Steps over which the density falls from 25 % to ``ratio``; the paper takes four epochs.
        values: How values are written, as for ``topk``.
        indices: How indices are written, as for ``topk``.
    """

    citation = "Lin et al. 2018, arXiv:1712.01887"
    published = Published(
        "Not by itself: the warm-up over four epochs, whose steps only the user knows (`warmup=`), and local clipping "
        "to `n ** -0.5` of a threshold that is the task's (`memory=gradwire.memory.MaskedMomentum(clip=0.25)`). The "
        "top-k is exact, not from a sample."
    )
    memory = "dgc"
    bias = "contractive"
    wire_bits = "k * (32 + 2 + log2(d / k))"

    ratio: float = 0.001
    warmup: int = 0
    values: str | ValueCoding = "fp32"
    indices: str | IndexCoding = "elias-fano"

    def __post_init__(self) -> None:
        self.codec()

    def codec(self) -> Sparse:
        """Selector, value coding, index coding."""
        return Sparse(WarmUp(self.ratio, self.warmup), values.parse(self.values), index.parse(self.indices))

    def error_bound(self, numel: int) -> float:
        """That of top-k."""
        return 1 - count_for(numel, self.ratio) / numel
