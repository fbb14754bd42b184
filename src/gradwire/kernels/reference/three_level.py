"""Minus one, zero or one, whichever is nearest."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradwire.kernels.reference._torch import keep, keep_all, largest, pieces_of, write_payload
from gradwire.kernels.reference.trits import pack_trits
from gradwire.layout import Block

LARGEST_FLOAT = (2 - 2.0**-23) * 2.0**127
"""The largest finite float32."""


def three_level_encode(
    block: Block,
    gradient: Tensor,
    residual: Tensor | None,
    beta: float,
    gamma: float,
    payload: Tensor,
    multiplier: float,
) -> None:
    """See :meth:`gradwire.kernels.Kernels.three_level_encode`."""
    scales = torch.zeros(block.segment_count, device=gradient.device)
    digits = torch.zeros(block.positions, dtype=torch.uint8, device=gradient.device)
    for segment in range(block.segment_count):
        pieces = pieces_of(block, segment, gradient, residual, beta, gamma)
        peak = largest(pieces)
        if math.isnan(peak):
            scales[segment] = torch.nan
            keep_all(pieces)
            continue
        scales[segment] = scale = gradient.new_tensor(min(multiplier * peak, LARGEST_FLOAT))
        threshold = scale * 0.5
        for piece in pieces:
            digit = 1 + (piece.t > threshold).int() - (piece.t < -threshold).int()
            digits[piece.span] = digit.to(torch.uint8)
            keep(piece.memory, piece.t - (digit - 1).float() * scale)
    write_payload(payload, scales, pack_trits(digits))
