"""Gaussian-k sparsification."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradwire.codecs import index
from gradwire.codecs.adaptive import AdaptiveSparse
from gradwire.codecs.index import IndexCoding
from gradwire.codecs.quantize import values
from gradwire.codecs.quantize.values import FloatValues, ValueCoding
from gradwire.codecs.select import NormalTail
from gradwire.methods.method import CodecMethod
from gradwire.methods.published import Published
from gradwire.methods.registry import register


@register("gaussiank")
@dataclass(frozen=True, kw_only=True)
class GaussianK(CodecMethod):
    """About k of the largest magnitudes, by the threshold of a fitted normal distribution, with error feedback.

    The threshold is the quantile of a normal distribution with the values' root mean square. Where less than 2/3 of k
    exceed it, it is halved; where more than 4/3 do, it is multiplied by 1.5; twice at most. Magnitudes that are nearly
    alike have no tail: only the largest of a segment is sent, or all are asked for, of which a payload takes what it
    has room for.

    Attributes:
        ratio: k as a share of a segment's elements, in (0, 1].
        capacity: How many coordinates fit in the first step, as a share of each parameter, in (0, 1]; twice the ratio
            if None.
        values: How values are written: ``"fp32"``, ``"fp16"``, ``"bf16"``, ``"sign"``, ``"qsgd:4"``, or an object.
        indices: How indices are written, as for ``topk``.
    """

    citation = "Shi et al. 2019, arXiv:1911.08772"
    published = Published(
        "The paper takes 0.1 % (`ratio=0.001`). Its authors' code fits the mean as well, which is taken for 0 here."
    )
    routes = ("gather",)
    memory = "residual"
    memories = ("none", "residual", "momentum", "dgc", "ef21")  # what a low-pass filter lets through has no tail
    bias = "biased"
    wire_bits = "32 + max(16, ceil(d * (capacity or min(1, 2 * ratio)))) * (34 - log2(capacity or min(1, 2 * ratio)))"

    ratio: float = 0.01
    capacity: float | None = None
    values: str | ValueCoding = "fp32"
    indices: str | IndexCoding = "elias-fano"

    def __post_init__(self) -> None:
        self.codec()

    def codec(self) -> AdaptiveSparse:
        """Criterion, capacity, value coding, index coding."""
        capacity = min(1.0, 2 * self.ratio) if self.capacity is None else self.capacity
        return AdaptiveSparse(NormalTail(self.ratio), capacity, values.parse(self.values), index.parse(self.indices))

    def error_bound(self, numel: int) -> float:
        """Few magnitudes may exceed what is expected of the largest; none for values that are quantised."""
        return 1.0 if isinstance(values.parse(self.values), FloatValues) else math.inf
