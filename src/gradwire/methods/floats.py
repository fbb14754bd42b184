"""The plain average, in full or half precision."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradwire.codecs.quantize import Cast
from gradwire.methods.method import LinearMethod
from gradwire.methods.registry import register


@register("dense")
@dataclass(frozen=True, kw_only=True)
class Dense(LinearMethod):
    """The exact average, uncompressed."""

    citation = "Li et al. 2020, PyTorch Distributed, arXiv:2006.15704"
    takes_all = True
    bias = "exact"
    wire_bits = "32 * d"

    def error_bound(self, numel: int) -> float:
        """Nothing is lost."""
        return 0.0

    def codec(self) -> Cast:
        """All 32 bits."""
        return Cast(torch.float32)


@register("fp16")
@dataclass(frozen=True, kw_only=True)
class FP16(LinearMethod):
    """Half precision on the wire: 16 bits a value, 5 of them exponent."""

    citation = "Micikevicius et al. 2018, arXiv:1710.03740"
    takes_all = True
    bias = "exact"
    wire_bits = "16 * d"

    def error_bound(self, numel: int) -> float:
        """Half a unit in the last of 11 digits, within the range of the type."""
        return 2.0**-22

    def codec(self) -> Cast:
        """Sixteen bits."""
        return Cast(torch.float16)


@register("bf16")
@dataclass(frozen=True, kw_only=True)
class BF16(LinearMethod):
    """Brain floating point on the wire: 16 bits a value, 8 of them exponent."""

    citation = "Kalamkar et al. 2019, arXiv:1905.12322"
    takes_all = True
    bias = "exact"
    wire_bits = "16 * d"

    def error_bound(self, numel: int) -> float:
        """Half a unit in the last of 8 digits."""
        return 2.0**-16

    def codec(self) -> Cast:
        """Sixteen bits."""
        return Cast(torch.bfloat16)
