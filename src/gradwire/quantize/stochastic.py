"""A few bits a value: evenly spaced levels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from gradwire import kernels
from gradwire.codec import Codec
from gradwire.errors import ConfigurationError
from gradwire.kernels.reference import stochastic_payload_bytes
from gradwire.layout import Block
from gradwire.memory import Feedback, Remainder


@dataclass(frozen=True)
class Stochastic(Codec):
    """Levels between zero and the norm of a bucket of values, rounded as QSGD does it, so that nothing is biased.

    With ``rounding="nearest"`` they are rounded to the nearest level, as block quantisation does it: every value is off
    by half a level at most, but biased, which needs error feedback.

    Attributes:
        bits: Bits a value with its sign: 2, 4 or 8.
        bucket: Consecutive values that share a scale; 0 for a whole segment.
        norm: ``"max"`` (the paper's practice) or ``"l2"`` (its theory).
        rounding: ``"stochastic"`` or ``"nearest"``.
    """

    bits: int = 4
    bucket: int = 512
    norm: Literal["max", "l2"] = "max"
    rounding: Literal["stochastic", "nearest"] = "stochastic"

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8):
            raise ConfigurationError(f"bits={self.bits!r} is not possible; choose 2, 4 or 8")
        if self.bucket < 0 or self.bucket % 8:
            raise ConfigurationError(
                f"bucket={self.bucket!r} is out of range; choose a multiple of 8, usually 512, or 0 for whole segments"
            )
        if self.norm not in ("max", "l2"):
            raise ConfigurationError(f"norm={self.norm!r} is not known; choose 'max' or 'l2'")
        if self.rounding not in ("stochastic", "nearest"):
            raise ConfigurationError(f"rounding={self.rounding!r} is not known; choose 'stochastic' or 'nearest'")

    @property
    def levels(self) -> int:
        """s, on each side of zero."""
        return (1 << (self.bits - 1)) - 1

    def error_bound(self, numel: int) -> float:
        """Of the squares of ``numel`` values, with stochastic rounding.

        A bucket of b values has a quarter of ``b / s^2``, or ``sqrt(b) / s`` (lemma 3.1 of Alistarh et al.).
        """
        bucket = min(numel, self.bucket or numel)
        return min(bucket / (4 * self.levels**2), math.sqrt(bucket) / self.levels)

    @property
    def remainder(self) -> Remainder:
        """Against the largest magnitude, no value is off by more than a step of ``1 / s`` of it, half that if nearest.

        A step of a bucket's L2 norm may be many times its largest value. What is rounded to the nearest such level is
        never off by more than itself, but sent at all only if a value is half a step.
        """
        if self.norm == "max":
            return "shrinks" if self.levels > 1 or self.rounding == "nearest" else "stays"
        if self.rounding == "nearest":
            return "shrinks" if 0 < self.bucket <= 4 * self.levels**2 else "stays"
        return "shrinks" if self.bucket and self.error_bound(self.bucket) < 1 else "grows"

    def payload_bytes(self, block: Block) -> int:
        """``bits`` a position and 4 bytes a bucket."""
        return stochastic_payload_bytes(block, self.bits, self.bucket)

    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, payload: Tensor, key: int) -> None:
        """Writes scales and levels."""
        kernels.for_device(gradient.device).stochastic_encode(
            block,
            gradient,
            feedback.residual,
            feedback.beta,
            feedback.gamma,
            payload,
            self.bits,
            self.bucket,
            self.norm == "l2",
            key,
            self.rounding == "nearest",
        )

    def decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """Sums scaled levels."""
        self.check(block, payloads)
        kernels.for_device(out.device).stochastic_decode(block, payloads, out, weight, self.bits, self.bucket)
