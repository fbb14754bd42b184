"""What methods have in common that send as many coordinates as the data asks for."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from gradwire.codecs import index
from gradwire.codecs.adaptive import AdaptiveSparse
from gradwire.codecs.index import IndexCoding
from gradwire.codecs.quantize import Quantiser, values
from gradwire.codecs.quantize.values import CodedValues, FloatValues, ValueCoding
from gradwire.codecs.select.criterion import Criterion, Thresholds
from gradwire.kernels import codes
from gradwire.methods.method import CodecMethod


@dataclass(frozen=True, kw_only=True)
class SignsByCriterion(CodecMethod):
    """One bit for each coordinate that meets a criterion, and a scale for each segment.

    Attributes:
        capacity: How many coordinates fit in the first step, as a share of each parameter, in (0, 1].
        indices: How indices are written, as for ``topk``.
    """

    routes = ("gather",)
    memory = "residual"
    bias: ClassVar[Literal["contractive", "biased"]] = "biased"
    wire_bits = "64 + max(16, ceil(capacity * d)) * (1 + 2 + log2(1 / capacity))"

    capacity: float = 0.02
    indices: str | IndexCoding = "elias-fano"

    def __post_init__(self) -> None:
        self.codec()

    @abstractmethod
    def criterion(self) -> Criterion:
        """Which coordinates are sent."""

    def coding(self) -> ValueCoding:
        """How their values are written."""
        return CodedValues(Quantiser(codes.Sign()))

    def codec(self) -> AdaptiveSparse:
        """Criterion, capacity, value coding, index coding."""
        return AdaptiveSparse(self.criterion(), self.capacity, self.coding(), index.parse(self.indices))


@dataclass(frozen=True, kw_only=True)
class ByCriterion(SignsByCriterion):
    """The values of all coordinates that meet a criterion.

    Attributes:
        values: How values are written: ``"fp32"``, ``"fp16"``, ``"bf16"``, ``"sign"``, ``"qsgd:4"``, or an object.
    """

    wire_bits = "32 + max(16, ceil(capacity * d)) * (32 + 2 + log2(1 / capacity))"

    values: str | ValueCoding = "fp32"

    def coding(self) -> ValueCoding:
        """As asked for."""
        return values.parse(self.values)

    def error_bound(self, numel: int) -> float:
        """Any coordinates may go, or none; no bound for values that are quantised."""
        return 1.0 if isinstance(self.coding(), FloatValues) else math.inf


@dataclass(frozen=True, kw_only=True)
class ByFittedTail(CodecMethod):
    """About k of the largest magnitudes, by the threshold of a fitted distribution, with error feedback.

    Attributes:
        ratio: k as a share of a segment's elements, in (0, 1].
        capacity: How many coordinates fit in the first step, as a share of each parameter, in (0, 1]; twice the ratio
            if None.
        values: How values are written: ``"fp32"``, ``"fp16"``, ``"bf16"``, ``"sign"``, ``"qsgd:4"``, or an object.
        indices: How indices are written, as for ``topk``.
    """

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

    @abstractmethod
    def tail(self) -> Thresholds:
        """The distribution that is fitted."""

    def codec(self) -> AdaptiveSparse:
        """Criterion, capacity, value coding, index coding."""
        tail = self.tail()
        capacity = min(1.0, 2 * self.ratio) if self.capacity is None else self.capacity
        return AdaptiveSparse(tail, capacity, values.parse(self.values), index.parse(self.indices))

    def error_bound(self, numel: int) -> float:
        """Few magnitudes may exceed what is expected of the largest; none for values that are quantised."""
        return 1.0 if isinstance(values.parse(self.values), FloatValues) else math.inf
