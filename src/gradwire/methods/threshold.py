"""Threshold sparsification."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs import index
from gradwire.codecs.adaptive import AdaptiveSparse
from gradwire.codecs.index import IndexCoding
from gradwire.codecs.quantize import values
from gradwire.codecs.quantize.values import ValueCoding
from gradwire.codecs.select import Fixed
from gradwire.methods.method import CodecMethod
from gradwire.methods.published import Published
from gradwire.methods.registry import register


@register("threshold")
@dataclass(frozen=True, kw_only=True)
class Threshold(CodecMethod):
    """Every value whose magnitude is at least ``v``, with error feedback.

    How many these are follows training: the same threshold sends less and less as gradients shrink. The layer-wise
    study has it without a memory; that, and that equality counts, are as in its public code.

    Attributes:
        threshold: v, positive, in units of the gradient.
        capacity: How many coordinates fit in the first step, as a share of each parameter, in (0, 1].
        values: How values are written: ``"fp32"``, ``"fp16"``, ``"bf16"``, ``"sign"``, ``"qsgd:4"``, or an object.
        indices: How indices are written, as for ``topk``.
    """

    citation = "Dutta et al. 2020, arXiv:1911.08250 (Threshold-v); Aji & Heafield 2017, arXiv:1704.05021"
    published = Published(
        "The layer-wise study has no feedback; Aji & Heafield have.",
        {"memory": "none"},
    )
    routes = ("gather",)
    memory = "residual"
    memories = ("none", "residual", "momentum", "dgc", "lowpass")
    bias = "biased"
    wire_bits = "32 + max(16, ceil(capacity * d)) * (32 + 2 + log2(1 / capacity))"

    threshold: float = 0.01
    capacity: float = 0.02
    values: str | ValueCoding = "fp32"
    indices: str | IndexCoding = "elias-fano"

    def __post_init__(self) -> None:
        self.codec()

    def codec(self) -> AdaptiveSparse:
        """Criterion, capacity, value coding, index coding."""
        return AdaptiveSparse(
            Fixed(self.threshold), self.capacity, values.parse(self.values), index.parse(self.indices)
        )

    def error_bound(self, numel: int) -> float:
        """All magnitudes may lie below the threshold; none for values that are quantised."""
        return bound_of_a_subset(self.values)


def bound_of_a_subset(coding: str | ValueCoding) -> float:
    """The relative error of sending any coordinates or none: at most 1, if they are sent as they are."""
    return 1.0 if isinstance(values.parse(coding), values.FloatValues) else float("inf")
