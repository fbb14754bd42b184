"""Sparsification by a threshold that is estimated, not searched."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradwire.codecs import index
from gradwire.codecs.adaptive import AdaptiveSparse
from gradwire.codecs.index import IndexCoding
from gradwire.codecs.quantize import values
from gradwire.codecs.quantize.values import FloatValues, ValueCoding
from gradwire.codecs.select import ExponentialTail
from gradwire.methods.method import CodecMethod
from gradwire.methods.published import Published
from gradwire.methods.registry import register


@register("sidco")
@dataclass(frozen=True, kw_only=True)
class SIDCo(CodecMethod):
    """About k of the largest magnitudes, by the threshold of a fitted exponential distribution, with error feedback.

    The double-exponential variant. Every 5 steps the number of stages goes up or down by one if the counts were off by
    more than 20 %; the first stage aims at a quarter. These numbers, and that stages share what is left evenly, are
    those of the authors' public code. A later stage fits from the threshold before it, not from the smallest magnitude
    that exceeds it. Stages are counted for each parameter, not for all together, and every rank counts its own.

    With tails heavier than exponential one stage sends too many, which fewer stages cannot mend. Where no number of
    stages comes within the 20 %, the rule goes back and forth between two: on the demo's CNN at 1 %, five steps of
    three stages (1.25 %) took turns with five of two (under 0.1 %). Magnitudes that are nearly alike have no tail: only
    the largest of a segment is sent in a step, until about half of them have been.

    Attributes:
        ratio: The share of a segment's elements to aim at, in (0, 1].
        capacity: How many coordinates fit in the first step, as a share of each parameter, in (0, 1]; twice the ratio
            if None.
        values: How values are written: ``"fp32"``, ``"fp16"``, ``"bf16"``, ``"sign"``, ``"qsgd:4"``, or an object.
        indices: How indices are written, as for ``topk``.
    """

    citation = "Abdelmoniem et al. 2021, arXiv:2101.10761"
    published = Published("Of the three fitted distributions the exponential one is here.")
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
        criterion = ExponentialTail(self.ratio)
        capacity = min(1.0, 2 * self.ratio) if self.capacity is None else self.capacity
        return AdaptiveSparse(criterion, capacity, values.parse(self.values), index.parse(self.indices))

    def error_bound(self, numel: int) -> float:
        """Few magnitudes may exceed what is expected of the largest; none for values that are quantised."""
        return 1.0 if isinstance(values.parse(self.values), FloatValues) else math.inf
