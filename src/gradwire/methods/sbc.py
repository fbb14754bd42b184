"""Sparse binary compression."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs import index
from gradwire.codecs.index import IndexCoding
from gradwire.codecs.quantize.values import MeanValues
from gradwire.codecs.select import OneSide, count_for
from gradwire.codecs.sparse import Sparse
from gradwire.methods.method import CodecMethod
from gradwire.methods.published import Published
from gradwire.methods.registry import register


@register("sbc")
@dataclass(frozen=True, kw_only=True)
class SBC(CodecMethod):
    """The k largest values of each segment or the k smallest, all as their mean, with error feedback.

    Whichever k have the larger mean magnitude go, so neither values nor signs travel: a float32 a segment, and
    positions. The paper sends changes of many local steps: ``gradwire.periodic(optimizer, every=100, method="sbc")``.

    Attributes:
        ratio: k as a share of a segment's elements, in (0, 0.5].
        indices: How indices are written, as for ``topk``.
    """

    citation = "Sattler et al. 2018, arXiv:1805.08768"
    published = Published("Positions are Elias-Fano coded; Golomb's code, which the paper has, takes as much.")
    memory = "residual"
    bias = "contractive"
    wire_bits = "32 + k * (2 + log2(d / k))"

    ratio: float = 0.01
    indices: str | IndexCoding = "elias-fano"

    def __post_init__(self) -> None:
        self.codec()

    def codec(self) -> Sparse:
        """Selector, value coding, index coding."""
        return Sparse(OneSide(self.ratio), MeanValues(), index.parse(self.indices))

    def error_bound(self, numel: int) -> float:
        """The k may add up to half of the largest magnitude, where it is the only one of its sign."""
        return 1 - 1 / (4 * numel * count_for(numel, self.ratio))
