"""SketchML."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire import index
from gradwire.index import IndexCoding
from gradwire.methods.method import CodecMethod
from gradwire.methods.published import Published
from gradwire.methods.registry import register
from gradwire.quantize.quantile import Quantile
from gradwire.quantize.values import CodedValues
from gradwire.select import TopMagnitudes
from gradwire.sparse import Sparse


@register("sketchml")
@dataclass(frozen=True, kw_only=True)
class SketchML(CodecMethod):
    """Chosen values as means of equally filled buckets, whose numbers go through a MinMaxSketch.

    The paper's gradients are sparse by themselves; here a top-k makes them so, and what it leaves out waits in the
    residual. As in the authors' code there are 256 buckets, two rows, and positive and negative values are kept apart.
    Other than there, quantiles are exact instead of a sketch's; a value is the mean of its bucket instead of the middle
    of the bucket's edges; signs are written out, where there each group of buckets has keys and a sketch of its own;
    and keys are written in Elias-Fano instead of the paper's delta-binary coding, whose size would not be known
    beforehand.

    Attributes:
        ratio: Values sent as a share of a segment's elements, in (0, 1].
        buckets: Buckets a segment: 4, 16 or 256.
        rows: Rows of the MinMaxSketch; 0 writes every bucket's number instead.
        columns: Columns of the MinMaxSketch as a share of the values sent.
        indices: How indices are written, as for ``topk``.
    """

    citation = "Jiang et al. 2018, SIGMOD, doi:10.1145/3183713.3196894"
    published = Published("Quantiles are exact instead of a sketch's, keys Elias-Fano instead of delta-binary.")
    routes = ("gather", "sharded")
    memory = "residual"
    bias = "biased"
    wire_bits = (
        "32 * (min(buckets, k) + min(rows, 1)) + k * (2 + log2(d / k))"
        " + k * (1 + rows * columns * log2(buckets) if rows else log2(buckets))"
    )

    ratio: float = 0.1
    buckets: int = 256
    rows: int = 2
    columns: float = 0.3
    indices: str | IndexCoding = "elias-fano"

    def __post_init__(self) -> None:
        self.codec()

    def codec(self) -> Sparse:
        """Top-k, quantile buckets, index coding."""
        quantile = Quantile(self.buckets, self.rows, self.columns)
        return Sparse(TopMagnitudes(self.ratio), CodedValues(quantile), index.parse(self.indices))

    def error_bound(self, numel: int) -> float:
        """Without a sketch a projection, worst for a lone value sent; with one, at most twice the values."""
        return 2.0 if self.rows else 1 - 1 / numel
