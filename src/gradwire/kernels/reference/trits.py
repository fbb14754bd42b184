"""Five digits of base 3 a byte, each times a scale."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.layout import aligned

DIGITS = 5
"""Digits of base 3 in a byte."""


def trits_stride(positions: int) -> int:
    """How many bytes hold ``positions`` digits, and how far apart the digits of one byte are."""
    return aligned(-(-positions // DIGITS))


def pack_trits(digits: Tensor) -> Tensor:
    """Packs digits 0, 1, 2; byte ``j`` holds digits ``j``, ``j + stride``, ..., the first as the lowest."""
    stride = trits_stride(digits.numel())
    rows = torch.nn.functional.pad(digits, (0, DIGITS * stride - digits.numel())).view(DIGITS, stride)
    weights = torch.tensor([3**row for row in range(DIGITS)], device=digits.device)
    return (rows * weights[:, None]).sum(0).to(torch.uint8)


def unpack_trits(packed: Tensor, positions: int) -> Tensor:
    """Inverse of :func:`pack_trits`, as int32; reads any byte modulo ``3**DIGITS``."""
    rows = [packed.to(torch.int32) // 3**row % 3 for row in range(DIGITS)]
    return torch.cat(rows)[:positions]


def read_trits(packed: Tensor, scales: Tensor) -> Tensor:
    """Digits less one, scaled."""
    return (unpack_trits(packed, len(scales)) - 1).float() * scales[:, 0]
