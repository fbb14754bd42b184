"""EF21."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradwire.codecs import index
from gradwire.codecs.index import IndexCoding
from gradwire.codecs.select import TopMagnitudes, count_for
from gradwire.codecs.sparse import Sparse
from gradwire.memory import Memory
from gradwire.methods.method import CodecMethod
from gradwire.methods.published import Published
from gradwire.methods.registry import register


@register("ef21")
@dataclass(frozen=True, kw_only=True)
class EF21(CodecMethod):
    """Top-k of what changed in the gradient, added to an estimate that everybody keeps.

    Any contractive codec can take top-k's place: ``compress(model, "efsignsgd", memory="ef21")``.

    Attributes:
        ratio: k as a share of a segment's elements, in (0, 1].
        indices: How indices are written, as for ``topk``.
    """

    citation = "Richtarik et al. 2021, arXiv:2106.05203"
    published = Published('Any other contractive compressor is `memory="ef21"`.')
    memory: ClassVar[str | Memory] = "ef21"
    bias = "contractive"
    wire_bits = "k * (32 + 2 + log2(d / k))"

    ratio: float = 0.01
    indices: str | IndexCoding = "elias-fano"

    def __post_init__(self) -> None:
        self.codec()

    def codec(self) -> Sparse:
        """The compressor C."""
        return Sparse(TopMagnitudes(self.ratio), indices=index.parse(self.indices))

    def error_bound(self, numel: int) -> float:
        """That of top-k."""
        return 1 - count_for(numel, self.ratio) / numel
