"""Top-k sparsification."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from gradwire.codecs import index
from gradwire.codecs.index import IndexCoding
from gradwire.codecs.quantize import values
from gradwire.codecs.quantize.values import FloatValues, ValueCoding
from gradwire.codecs.select import Selector, TopMagnitudes, count_for
from gradwire.codecs.sparse import Sparse
from gradwire.methods.method import CodecMethod, Context, Method, Worker
from gradwire.methods.published import Published
from gradwire.methods.registry import register


@register("topk")
@dataclass(frozen=True, kw_only=True)
class TopK(CodecMethod):
    """The k largest magnitudes of each segment, exactly, with error feedback.

    Attributes:
        ratio: k as a share of a segment's elements, in (0, 1].
        values: How values are written: a name of ``gradwire.codecs.quantize.values.names()``, such as ``"fp32"``,
            ``"bf16"``, ``"sign"`` or ``"qsgd:4"``, or an object.
        indices: How indices are written: ``"elias-fano"``, ``"entropy"``, ``"bitmap"``, ``"raw"``, or an object.
    """

    citation = "Aji & Heafield 2017, arXiv:1704.05021; Stich et al. 2018, arXiv:1809.07599"
    published = Published(
        "The choice is exact, where Aji & Heafield take the threshold from a sample. They compare one of each matrix "
        'and one of the whole model, `granularity="model"`.'
    )
    routes = ("gather", "sharded")
    memory = "residual"
    bias = "contractive"
    wire_bits = "k * (32 + 2 + log2(d / k))"

    ratio: float = 0.01
    values: str | ValueCoding = "fp32"
    indices: str | IndexCoding = "elias-fano"

    def __post_init__(self) -> None:
        self.codec()

    def codec(self) -> Sparse:
        """Selector, value coding, index coding."""
        return Sparse(self.selector(), values.parse(self.values), index.parse(self.indices))

    def selector(self) -> Selector:
        """Which coordinates."""
        return TopMagnitudes(self.ratio)

    def error_bound(self, numel: int) -> float:
        """All magnitudes alike are the worst there is; none for values that are quantised."""
        if not isinstance(values.parse(self.values), FloatValues):
            return math.inf
        return 1 - count_for(numel, self.ratio) / numel


@dataclass(frozen=True, kw_only=True)
class LocalTopK(Method):
    """What begins with a worker's k largest magnitudes, and goes on in another way than gathering them all.

    Attributes:
        ratio: k as a share of a segment's elements, in (0, 1].
        indices: How indices are written: ``"elias-fano"``, ``"bitmap"``, ``"raw"``, or an object of fixed size.
    """

    memory = "residual"
    memories: ClassVar[tuple[str, ...]] = ("none", "residual")
    bias = "contractive"
    wire_bits = "k * (32 + 2 + log2(d / k))"

    ratio: float = 0.01
    indices: str | IndexCoding = "elias-fano"

    def __post_init__(self) -> None:
        self.select()
        self.coding()

    def select(self) -> TopMagnitudes:
        """The local choice."""
        return TopMagnitudes(self.ratio)

    def coding(self) -> IndexCoding:
        """Of a size that depends on the number of indices alone."""
        return index.parse_fixed(self.indices)

    def error_bound(self, numel: int) -> float:
        """Of one worker alone."""
        return 1 - count_for(numel, self.ratio) / numel

    def init(self, context: Context) -> Worker:
        """Sets up the memory."""
        return Worker(context, context.feedback())
