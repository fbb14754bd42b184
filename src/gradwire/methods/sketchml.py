"""SketchML."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs import index
from gradwire.codecs.index import IndexCoding
from gradwire.codecs.quantize.quantile import Quantile
from gradwire.codecs.quantize.values import CodedValues
from gradwire.codecs.select import TopMagnitudes
from gradwire.codecs.sparse import Sparse
from gradwire.methods.method import CodecMethod
from gradwire.methods.published import Published
from gradwire.methods.registry import register


@register("sketchml")
@dataclass(frozen=True, kw_only=True)
class SketchML(CodecMethod):
    """Chosen values as means of equally filled buckets, whose numbers go through grouped MinMaxSketches.

    The paper's gradients are sparse by themselves; here a top-k makes them so, and what it leaves out waits in the
    residual. As in the authors' code there are 256 buckets in 8 groups, each of one sign and with a sketch of its own
    of two rows. Other than there, quantiles are exact instead of a sketch's; a value is the mean of its bucket instead
    of the middle of the bucket's edges; groups have equally many columns; and keys are written once, in Elias-Fano, and
    3 bits for each value's group, where there each group has keys of its own, which takes as many bits more. Their
    delta-binary coding has no size that would be known beforehand. With sketches a value takes 7.8 bits and a
    hundredth of its energy is lost; 8 bits with ``rows=0`` lose a ten-thousandth. Values that meet in all rows read as
    the smallest of them: where a group has one column, with ``k <= groups / columns``, a large value next to small ones
    is sent as one of these in every step, and what it is owed grows without end.

    Attributes:
        ratio: Values sent as a share of a segment's elements, in (0, 1].
        buckets: Buckets a segment: 4, 16 or 256.
        rows: Rows of the MinMaxSketch; 0 writes every bucket's number instead.
        columns: Columns of all groups' sketches together as a share of the values sent.
        groups: Groups of buckets, 2, 4, 8 or 16.
        indices: How indices are written, as for ``topk``.
    """

    citation = "Jiang et al. 2018, SIGMOD, doi:10.1145/3183713.3196894"
    published = Published("Quantiles are exact instead of a sketch's, keys Elias-Fano instead of delta-binary.")
    routes = ("gather", "sharded")
    memory = "residual"
    bias = "biased"
    wire_bits = (
        "32 * (min(buckets, k) + min(rows, 1)) + k * (2 + log2(d / k) + log2(groups if rows else buckets))"
        " + rows * groups * ceil(k * columns / groups) * log2(buckets)"
    )

    ratio: float = 0.1
    buckets: int = 256
    rows: int = 2
    columns: float = 0.3
    groups: int = 8
    indices: str | IndexCoding = "elias-fano"

    def __post_init__(self) -> None:
        self.codec()

    def codec(self) -> Sparse:
        """Top-k, quantile buckets, index coding."""
        quantile = Quantile(self.buckets, self.rows, self.columns, self.groups)
        return Sparse(TopMagnitudes(self.ratio), CodedValues(quantile), index.parse(self.indices))

    def error_bound(self, numel: int) -> float:
        """Without a sketch a projection, worst for a lone value sent; with one, at most twice the values."""
        return 2.0 if self.rows else 1 - 1 / numel
