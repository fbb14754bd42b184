"""The layer-wise study's adaptive threshold."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs import index
from gradwire.codecs.adaptive import AdaptiveSparse
from gradwire.codecs.index import IndexCoding
from gradwire.codecs.quantize import values
from gradwire.codecs.quantize.values import ValueCoding
from gradwire.codecs.select import HalfMaximum
from gradwire.methods.method import CodecMethod
from gradwire.methods.published import Published
from gradwire.methods.registry import register
from gradwire.methods.threshold import bound_of_a_subset


@register("adaptive")
@dataclass(frozen=True, kw_only=True)
class Adaptive(CodecMethod):
    """Every value whose magnitude, doubled, is at least the largest of its segment.

    AdaComp's test with one bin a segment and without a residual, so that the latest gradient is all there is; that, and
    that values go unquantised, are as in the study's public code. One outlier keeps everything else back: the largest
    is always sent, and it alone if it is twice as large as the next. With a memory, the test is of compensated values.

    Attributes:
        capacity: How many coordinates fit in the first step, as a share of each parameter, in (0, 1].
        values: How values are written: ``"fp32"``, ``"fp16"``, ``"bf16"``, ``"sign"``, ``"qsgd:4"``, or an object.
        indices: How indices are written, as for ``topk``.
    """

    citation = "Dutta et al. 2020, arXiv:1911.08250 (Adaptive threshold), after Chen et al. 2018, arXiv:1712.02679"
    published = Published("A payload has room for what the step before wanted.")
    routes = ("gather",)
    memory = "none"
    bias = "contractive"
    wire_bits = "32 + max(16, ceil(capacity * d)) * (32 + 2 + log2(1 / capacity))"

    capacity: float = 0.02
    values: str | ValueCoding = "fp32"
    indices: str | IndexCoding = "elias-fano"

    def __post_init__(self) -> None:
        self.codec()

    def codec(self) -> AdaptiveSparse:
        """Criterion, capacity, value coding, index coding."""
        return AdaptiveSparse(HalfMaximum(), self.capacity, values.parse(self.values), index.parse(self.indices))

    def error_bound(self, numel: int) -> float:
        """The largest magnitude goes, so at most ``1 - 1 / d`` stays; no bound for values that are quantised."""
        return bound_of_a_subset(self.values) * (1 - 1 / numel)
