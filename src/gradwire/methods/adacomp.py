"""Residuals that stand out in small bins."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradwire.codecs import index
from gradwire.codecs.adaptive import AdaptiveSparse
from gradwire.codecs.index import IndexCoding
from gradwire.codecs.quantize import Quantiser
from gradwire.codecs.quantize.values import CodedValues
from gradwire.codecs.select import LocalMaxima
from gradwire.kernels import codes
from gradwire.methods.method import CodecMethod
from gradwire.methods.published import Published
from gradwire.methods.registry import register


@register("adacomp")
@dataclass(frozen=True, kw_only=True)
class AdaComp(CodecMethod):
    """Of each bin, what would reach the bin's largest residual if the latest gradient came once more.

    With ``G = residual + g`` and ``H = G + g`` a coordinate is sent if ``|H|`` is at least the largest ``|G|`` of its
    bin; how many these are adapts by itself. Each goes as the sign of G, at a scale that is the mean over the segment's
    bins of that largest ``|G|``; what is left stays.

    The paper's abstract was read, and a public implementation has the same test; widths of bins and the scale are from
    memory. Runs of zeros are not sent. Indices are Elias-Fano instead of the paper's 8 or 16 bits within a bin.

    Attributes:
        bin: Consecutive elements of a parameter that form a bin; None for 50 in parameters of three dimensions or more
            (kernels of convolutions) and 500 in all others.
        capacity: How many coordinates fit in the first step, as a share of each parameter, in (0, 1].
        indices: How indices are written, as for ``topk``.
    """

    citation = "Chen et al. 2018, arXiv:1712.02679"
    published = Published("Indices are Elias-Fano coded, and a payload has room for what the step before wanted.")
    routes = ("gather",)
    memory = "residual"
    memories = ("none", "residual")
    bias = "biased"
    wire_bits = "64 + max(16, ceil(capacity * d)) * (1 + 2 + log2(1 / capacity))"

    bin: int | None = None
    capacity: float = 0.02
    indices: str | IndexCoding = "elias-fano"

    def __post_init__(self) -> None:
        self.codec()

    def codec(self) -> AdaptiveSparse:
        """Criterion, capacity, value coding, index coding."""
        signs = CodedValues(Quantiser(codes.Sign()))
        return AdaptiveSparse(LocalMaxima(self.bin), self.capacity, signs, index.parse(self.indices))

    def error_bound(self, numel: int) -> float:
        """One scale for bins of different sizes may exceed small values by far."""
        return math.inf
