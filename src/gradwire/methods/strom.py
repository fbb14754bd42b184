"""Threshold quantisation: steps of one size, whenever enough has piled up."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs import index
from gradwire.codecs.adaptive import AdaptiveSparse
from gradwire.codecs.index import IndexCoding
from gradwire.codecs.quantize import Quantiser
from gradwire.codecs.quantize.values import CodedValues
from gradwire.codecs.select import Steps
from gradwire.kernels import codes
from gradwire.methods.method import CodecMethod
from gradwire.methods.published import Published
from gradwire.methods.registry import register


@register("strom")
@dataclass(frozen=True, kw_only=True)
class Strom(CodecMethod):
    """Where the accumulated gradient exceeds tau, one step of tau with its sign; the rest accumulates on.

    A value takes one bit, and tau itself 4 bytes a segment. The paper was not at hand: that a step is ``sign(r) tau``
    and is taken from the residual is as in the many descriptions of it; that only ``|r| > tau`` counts, and not
    equality, is from memory. Its word of 32 bits, index and sign together, is replaced by Elias-Fano indices.

    Attributes:
        threshold: tau, positive, in units of the gradient.
        capacity: How many coordinates fit in the first step, as a share of each parameter, in (0, 1].
        indices: How indices are written, as for ``topk``.
    """

    citation = "Strom 2015, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing, Interspeech"
    published = Published("Indices are Elias-Fano coded, and a payload has room for what the step before wanted.")
    routes = ("gather",)
    memory = "residual"
    memories = ("none", "residual", "momentum", "dgc", "lowpass")
    bias = "biased"
    wire_bits = "64 + max(16, ceil(capacity * d)) * (1 + 2 + log2(1 / capacity))"

    threshold: float = 0.01
    capacity: float = 0.02
    indices: str | IndexCoding = "elias-fano"

    def __post_init__(self) -> None:
        self.codec()

    def codec(self) -> AdaptiveSparse:
        """Criterion, capacity, value coding, index coding."""
        signs = CodedValues(Quantiser(codes.Sign()))
        return AdaptiveSparse(Steps(self.threshold), self.capacity, signs, index.parse(self.indices))

    def error_bound(self, numel: int) -> float:
        """A step towards a larger value leaves less of it, and all may lie below tau."""
        return 1.0
