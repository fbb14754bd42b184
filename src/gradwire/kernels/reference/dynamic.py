"""Eight bits a value: a sign, and an entry of a table of magnitudes that is finer near zero."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradwire.kernels.reference._torch import (
    keep,
    keep_all,
    largest,
    padded,
    pieces_of,
    segment_of_positions,
    write_mean,
    write_payload,
)
from gradwire.kernels.reference.stochastic import SMALLEST_SCALE
from gradwire.layout import Block

EXPONENTS = 7
"""Decades of the table: with ``n`` leading zeros before the flag, ``6 - n`` bits are left for the fraction."""


def magnitudes() -> Tensor:
    """The 128 magnitudes of a 7-bit code, ascending.

    Code 0 stands for 0. The other codes have ``n`` leading zeros, a flag bit, and ``6 - n`` bits that bisect (0.1, 1):
    they stand for the middle of what is left of it, times ``10**-n``.
    """
    table = [0.0]
    for bits in range(EXPONENTS):
        table += [10.0 ** (bits + 1 - EXPONENTS) * (0.1 + 0.9 * (part + 0.5) / 2**bits) for part in range(2**bits)]
    return torch.tensor(table, dtype=torch.float32)


def thresholds() -> Tensor:
    """The middle between each two neighbours of :func:`magnitudes`."""
    table = magnitudes().double()
    return ((table[1:] + table[:-1]) / 2).float()


def dynamic_payload_bytes(block: Block) -> int:
    """See :meth:`gradwire.kernels.Kernels.dynamic_payload_bytes`."""
    return padded(4 * block.segment_count + block.positions)


def dynamic_encode(
    block: Block, gradient: Tensor, residual: Tensor | None, beta: float, gamma: float, payload: Tensor
) -> None:
    """See :meth:`gradwire.kernels.Kernels.dynamic_encode`."""
    table, edges = magnitudes().to(gradient.device), thresholds().to(gradient.device)
    scales = torch.zeros(block.segment_count, device=gradient.device)
    codes = torch.zeros(block.positions, dtype=torch.uint8, device=gradient.device)
    for segment in range(block.segment_count):
        pieces = pieces_of(block, segment, gradient, residual, beta, gamma)
        peak = largest(pieces)
        if math.isnan(peak):
            scales[segment] = torch.nan
            keep_all(pieces)
            continue
        scales[segment] = scale = gradient.new_tensor(peak if peak >= SMALLEST_SCALE else 0.0)
        inverse = 1 / scale if scale > 0 else torch.zeros_like(scale)
        for piece in pieces:
            negative = piece.t < 0
            code = torch.bucketize(piece.t.abs() * inverse, edges)
            codes[piece.span] = (code + 128 * negative).to(torch.uint8)
            sent = table[code] * scale
            keep(piece.memory, piece.t - torch.where(negative, -sent, sent))
    write_payload(payload, scales, codes)


def dynamic_decode(block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
    """See :meth:`gradwire.kernels.Kernels.dynamic_decode`."""
    head = 4 * block.segment_count
    table = magnitudes().to(out.device)
    table = torch.cat((table, -table))
    segments = segment_of_positions(block, out.device)
    rows = torch.zeros(len(payloads), block.positions, device=out.device)
    for row, payload in zip(rows, payloads, strict=True):
        scales = payload[:head].contiguous().view(torch.float32)
        row.copy_(table[payload[head : head + block.positions].long()] * scales[segments])
    write_mean(block, rows, out, weight)
