"""Four bits a value: a sign, and how far its exponent lies below the largest."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradwire.kernels.reference._torch import (
    keep,
    keep_all,
    largest,
    pack,
    padded,
    pieces_of,
    segment_of_positions,
    unpack,
    write_mean,
    write_payload,
)
from gradwire.layout import Block

ZERO = 7
"""The distance that stands for zero."""


def exponent_payload_bytes(block: Block) -> int:
    """See :meth:`gradwire.kernels.Kernels.exponent_payload_bytes`."""
    return padded(4 * block.segment_count + block.positions // 2)


def exponent_encode(
    block: Block, gradient: Tensor, residual: Tensor | None, beta: float, gamma: float, payload: Tensor
) -> None:
    """See :meth:`gradwire.kernels.Kernels.exponent_encode`.

    The nearest power of two is the exponent field of ``|t|`` after half of the fraction was added; 0 counts as zero.
    """
    scales = torch.zeros(block.segment_count, device=gradient.device)
    codes = torch.zeros(block.positions, dtype=torch.int32, device=gradient.device)
    for segment in range(block.segment_count):
        pieces = pieces_of(block, segment, gradient, residual, beta, gamma)
        peak = largest(pieces)
        if math.isnan(peak):
            scales[segment] = torch.nan
            keep_all(pieces)
            continue
        top = int(gradient.new_tensor(peak).view(torch.int32)) >> 23
        scales[segment] = scale = gradient.new_tensor(top << 23, dtype=torch.int32).view(torch.float32)
        for piece in pieces:
            field = (piece.t.abs().view(torch.int32) + (1 << 22)) >> 23
            distance = (top - field).clamp(0, ZERO).masked_fill(field == 0, ZERO)
            code = distance | (piece.t < 0).int() << 3
            codes[piece.span] = code
            keep(piece.memory, piece.t - _parts(code) * scale)
    write_payload(payload, scales, pack(codes, 4))


def exponent_decode(block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
    """See :meth:`gradwire.kernels.Kernels.exponent_decode`."""
    head = 4 * block.segment_count
    segments = segment_of_positions(block, out.device)
    rows = torch.zeros(len(payloads), block.positions, device=out.device)
    for row, payload in zip(rows, payloads, strict=True):
        scales = payload[:head].contiguous().view(torch.float32)
        row.copy_(_parts(unpack(payload[head : head + block.positions // 2], 4)) * scales[segments])
    write_mean(block, rows, out, weight)


def _parts(codes: Tensor) -> Tensor:
    """What the codes stand for, as multiples of the scale."""
    distance = codes & 7
    magnitudes = ((127 - distance) << 23).view(torch.float32).masked_fill(distance == ZERO, 0)
    return torch.where(codes >> 3 == 1, -magnitudes, magnitudes)
