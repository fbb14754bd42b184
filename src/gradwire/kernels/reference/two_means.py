"""One bit a value and the mean of either side."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradwire.kernels.reference._torch import (
    keep,
    keep_all,
    pack,
    padded,
    pieces_of,
    run_total,
    segment_of_positions,
    unpack,
    write_mean,
    write_payload,
)
from gradwire.layout import Block


def two_means_payload_bytes(block: Block) -> int:
    """See :meth:`gradwire.kernels.Kernels.two_means_payload_bytes`."""
    return padded(8 * block.segment_count + block.positions // 8)


def two_means_encode(
    block: Block, gradient: Tensor, residual: Tensor | None, beta: float, gamma: float, payload: Tensor
) -> None:
    """See :meth:`gradwire.kernels.Kernels.two_means_encode`."""
    means = torch.zeros(block.segment_count, 2, device=gradient.device)
    negative = torch.zeros(block.positions, dtype=torch.uint8, device=gradient.device)
    for segment in range(block.segment_count):
        pieces = pieces_of(block, segment, gradient, residual, beta, gamma)
        above, below, negatives = 0.0, 0.0, 0
        for piece in pieces:
            minus = piece.t < 0
            above += run_total(piece.t.double().masked_fill(minus, 0))
            below += run_total(piece.t.double().masked_fill(~minus, 0))
            negatives += int(minus.sum())
        if not math.isfinite(above + below):
            means[segment] = torch.nan
            keep_all(pieces)
            continue
        others = int(block.segment_numels[segment]) - negatives
        means[segment] = gradient.new_tensor([above / max(others, 1), below / max(negatives, 1)])
        for piece in pieces:
            negative[piece.span] = piece.t < 0
            keep(piece.memory, piece.t - means[segment][(piece.t < 0).long()])
    write_payload(payload, means, pack(negative, 1))


def two_means_decode(block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
    """See :meth:`gradwire.kernels.Kernels.two_means_decode`."""
    head = 8 * block.segment_count
    segments = segment_of_positions(block, out.device)
    rows = torch.zeros(len(payloads), block.positions, device=out.device)
    for row, payload in zip(rows, payloads, strict=True):
        means = payload[:head].contiguous().view(torch.float32)
        row.copy_(means[2 * segments + unpack(payload[head : head + block.positions // 8], 1)])
    write_mean(block, rows, out, weight)
