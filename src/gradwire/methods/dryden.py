"""Adaptive quantisation: a share of either side, each side by its mean."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs import index
from gradwire.codecs.index import IndexCoding
from gradwire.codecs.quantize import Quantiser
from gradwire.codecs.quantize.values import CodedValues
from gradwire.codecs.select import EitherSide
from gradwire.codecs.sparse import Sparse
from gradwire.kernels import codes
from gradwire.methods.method import CodecMethod
from gradwire.methods.published import Published
from gradwire.methods.registry import register


@register("dryden")
@dataclass(frozen=True, kw_only=True)
class Dryden(CodecMethod):
    """The same share of positive and of negative values, the largest, each side as its mean, with error feedback.

    The paper was not at hand, but its authors' code, LBANN's quantizer of July to October 2016: sides apart, one
    proportion of each and at least one value, means, what is left added to the next gradient; at first for whole
    matrices, since August for each column; thresholds from a sample. (In 2017 one threshold of magnitude for both sides
    took their place.) Here the choice is exact, and the number fixed: the proportion of the whole segment, divided as
    the segment's signs are, with at least one value of each; where it is one in all, that is the largest.

    Attributes:
        ratio: pi, the share of either side, in (0, 1].
        indices: How indices are written, as for ``topk``.
    """

    citation = "Dryden et al. 2016, Communication Quantization for Data-parallel Training, doi:10.1109/MLHPC.2016.4"
    published = Published(
        "The choice is exact and of a whole layer; the authors' code takes thresholds from a sample, and later has "
        "them and means for each column of a matrix."
    )
    memory = "residual"
    bias = "biased"
    wire_bits = "64 + k * (1 + 2 + log2(d / k))"

    ratio: float = 0.01
    indices: str | IndexCoding = "elias-fano"

    def __post_init__(self) -> None:
        self.codec()

    def codec(self) -> Sparse:
        """Selector, value coding, index coding."""
        return Sparse(EitherSide(self.ratio), CodedValues(Quantiser(codes.OneBit())), index.parse(self.indices))

    def error_bound(self, numel: int) -> float:
        """A mean never adds to the error, and may be far from one value of its side that is nearly all."""
        return 1.0
