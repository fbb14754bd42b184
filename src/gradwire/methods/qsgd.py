"""QSGD."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from gradwire.errors import ConfigurationError
from gradwire.kernels import codes
from gradwire.methods.method import CodecMethod
from gradwire.methods.registry import register
from gradwire.quantize import Quantiser


@register("qsgd")
@dataclass(frozen=True, kw_only=True)
class QSGD(CodecMethod):
    """Stochastic rounding to a few levels: unbiased, so it needs no memory.

    The defaults are the paper's practice: buckets of 512 values scaled by their largest magnitude.

    Attributes:
        bits: Bits a value with its sign: 2, 4 or 8.
        bucket: Consecutive values that share a scale, a multiple of 8; 0 for a whole segment.
        norm: ``"max"``, or ``"l2"`` as in the paper's analysis.
    """

    citation = "Alistarh et al. 2017, arXiv:1610.02132"
    routes = ("sharded", "gather")
    bias = "unbiased"
    wire_bits = "bits * d + 32 * ceil(d / (bucket or d))"

    bits: int = 4
    bucket: int = 512
    norm: Literal["max", "l2"] = "max"

    def __post_init__(self) -> None:
        if self.norm not in ("max", "l2"):
            raise ConfigurationError(f"norm={self.norm!r} is not known; choose 'max' or 'l2'")
        self.codec()

    def codec(self) -> Quantiser:
        """A few bits a value, one scale a bucket."""
        return Quantiser(codes.QSGD(self.bits, self.norm == "l2"), self.bucket)

    def error_bound(self, numel: int) -> float:
        """A bucket of b values on s levels: a quarter of ``b / s^2``, or ``sqrt(b) / s`` (the paper's lemma 3.1)."""
        bucket, levels = min(numel, self.bucket or numel), (1 << (self.bits - 1)) - 1
        return min(bucket / (4 * levels**2), math.sqrt(bucket) / levels)
