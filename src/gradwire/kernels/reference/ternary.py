"""Minus one, zero or one, drawn so that the mean is right."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradwire.kernels.reference._torch import (
    Piece,
    draws,
    keep,
    keep_all,
    largest,
    pieces_of,
    run_total,
    write_payload,
)
from gradwire.kernels.reference.stochastic import SMALLEST_SCALE
from gradwire.kernels.reference.trits import pack_trits
from gradwire.layout import Block
from gradwire.randomness import run_keys

SMALLEST_VARIANCE = 2.0**-40
"""A smaller share of the mean square may be nothing but rounding, and counts as no variance."""


def ternary_encode(
    block: Block,
    gradient: Tensor,
    residual: Tensor | None,
    beta: float,
    gamma: float,
    payload: Tensor,
    clip: float,
    key: int,
) -> None:
    """See :meth:`gradwire.kernels.Kernels.ternary_encode`.

    ``t`` is sent as ``sign(t) * scale`` where ``u < |t| * (1 / scale)``, with ``u`` the middle of one of ``2**23``
    equal parts of [0, 1).
    """
    keys = run_keys(key, block.streams).tolist()
    scales = torch.zeros(block.segment_count, device=gradient.device)
    digits = torch.zeros(block.positions, dtype=torch.uint8, device=gradient.device)
    for segment in range(block.segment_count):
        pieces = pieces_of(block, segment, gradient, residual, beta, gamma)
        scales[segment] = scale = gradient.new_tensor(_scale(pieces, clip))
        if scale.isnan():
            keep_all(pieces)
            continue
        inverse = 1 / scale if scale > 0 else torch.zeros_like(scale)
        for piece in pieces:
            uniform = (draws(block, keys, piece) >> 9).float() * 2.0**-23 + 2.0**-24
            sent = uniform < piece.t.abs() * inverse
            digit = 1 + torch.where(piece.t < 0, -1, 1) * sent
            digits[piece.span] = digit.to(torch.uint8)
            keep(piece.memory, piece.t - (digit - 1).float() * scale)
    write_payload(payload, scales, pack_trits(digits))


def _scale(pieces: list[Piece], clip: float) -> float:
    """The largest magnitude, or ``clip`` standard deviations if that is less; NaN or 0 as for stochastic levels."""
    scale = largest(pieces)
    if clip and not math.isnan(scale):
        total, square, numel = 0.0, 0.0, 0
        for piece in pieces:
            values = piece.t.double()
            total += run_total(values)
            square += run_total(values * values)
            numel += values.numel()
        mean, mean_square = total / numel, square / numel
        variance = mean_square - mean * mean
        if variance > SMALLEST_VARIANCE * mean_square:
            scale = min(scale, clip * math.sqrt(variance))
    return 0.0 if scale < SMALLEST_SCALE else scale
