"""The number of the bucket that a value lies in, of buckets that hold equally many values."""

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
    run_total,
    segment_of_positions,
    unpack,
    write_mean,
    write_payload,
)
from gradwire.layout import Block


def quantile_payload_bytes(block: Block, bits: int) -> int:
    """See :meth:`gradwire.kernels.Kernels.quantile_payload_bytes`."""
    return padded(4 * block.segment_count * 2**bits + block.positions * bits // 8)


def quantile_encode(
    block: Block, gradient: Tensor, residual: Tensor | None, beta: float, gamma: float, payload: Tensor, bits: int
) -> None:
    """See :meth:`gradwire.kernels.Kernels.quantile_encode`.

    Of ``n`` values in ascending order, equal ones in the order of the segment, the one of rank ``r`` is in bucket
    ``r * 2**bits // n``.
    """
    count = 2**bits
    means = torch.zeros(block.segment_count, count, device=gradient.device)
    codes = torch.zeros(block.positions, dtype=torch.int32, device=gradient.device)
    for segment in range(block.segment_count):
        pieces = pieces_of(block, segment, gradient, residual, beta, gamma)
        if math.isnan(largest(pieces)):
            means[segment] = torch.nan
            keep_all(pieces)
            continue
        values, order = torch.cat([piece.t for piece in pieces]).sort(stable=True)
        buckets = torch.arange(values.numel(), device=values.device) * count // values.numel()
        for bucket in buckets.unique().tolist():
            members = values[buckets == bucket].double()
            means[segment, bucket] = run_total(members) / members.numel()
        code = torch.empty_like(buckets).scatter_(0, order, buckets).int()
        for piece, part in zip(pieces, torch.split(code, [piece.t.numel() for piece in pieces]), strict=True):
            codes[piece.span] = part
            keep(piece.memory, piece.t - means[segment][part])
    write_payload(payload, means, pack(codes, bits))


def quantile_decode(block: Block, payloads: Tensor, out: Tensor, weight: float, bits: int) -> None:
    """See :meth:`gradwire.kernels.Kernels.quantile_decode`."""
    head = 4 * block.segment_count * 2**bits
    segments = segment_of_positions(block, out.device)
    rows = torch.zeros(len(payloads), block.positions, device=out.device)
    for row, payload in zip(rows, payloads, strict=True):
        means = payload[:head].contiguous().view(torch.float32)
        codes = unpack(payload[head : head + block.positions * bits // 8], bits)
        row.copy_(means[segments * 2**bits + codes])
    write_mean(block, rows, out, weight)
