"""NUQSGD."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradwire.kernels import codes
from gradwire.methods.method import CodecMethod
from gradwire.methods.registry import register
from gradwire.quantize import Quantiser


@register("nuqsgd")
@dataclass(frozen=True, kw_only=True)
class NUQSGD(CodecMethod):
    """QSGD with levels at powers of two, finer where most values are.

    Attributes:
        bits: Bits a value with its sign: 2, 4 or 8.
        bucket: Consecutive values that share a Euclidean norm, a multiple of 8; 0 for a whole segment.
    """

    citation = "Ramezani-Kebrya et al. 2021, arXiv:2104.13818"
    routes = ("sharded", "gather")
    bias = "unbiased"
    wire_bits = "bits * d + 32 * ceil(d / (bucket or d))"

    bits: int = 4
    bucket: int = 512

    def __post_init__(self) -> None:
        self.codec()

    def codec(self) -> Quantiser:
        """Zero and powers of two, one scale a bucket."""
        return Quantiser(codes.NUQSGD(self.bits), self.bucket)

    def error_bound(self, numel: int) -> float:
        """An eighth between powers; below the smallest, ``l``, at most ``l^2 / 4`` a value, and ``l |x|_1`` in all."""
        bucket, smallest = min(numel, self.bucket or numel), 2.0 ** (2 - (1 << (self.bits - 1)))
        return 1 / 8 + min(bucket * smallest**2 / 4, math.sqrt(bucket) * smallest)
