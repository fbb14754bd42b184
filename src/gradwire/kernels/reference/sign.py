"""Signs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradwire.kernels.reference._torch import (
    as_bytes,
    compensated,
    flat_runs,
    keep,
    pack,
    padded,
    run_total,
    sum_in_order,
    unpack,
)
from gradwire.layout import Block


def sign_payload_bytes(block: Block) -> int:
    """See :meth:`gradwire.kernels.Kernels.sign_payload_bytes`."""
    return padded(4 * block.segment_count + block.positions // 8)


def sign_encode(
    block: Block,
    gradient: Tensor,
    residual: Tensor | None,
    beta: float,
    gamma: float,
    payload: Tensor,
    euclidean: bool = False,
) -> None:
    """See :meth:`gradwire.kernels.Kernels.sign_encode`."""
    scales = torch.zeros(block.segment_count, device=gradient.device)
    negative = torch.zeros(block.positions, dtype=torch.uint8, device=gradient.device)
    for segment in range(block.segment_count):
        runs = flat_runs(block, segment)
        kept = [None if residual is None else residual[start:stop] for _, start, stop, _ in runs]
        values = [
            compensated(gradient[start:stop], old, beta, gamma)
            for (_, start, stop, _), old in zip(runs, kept, strict=True)
        ]
        total = 0.0
        for t in values:
            total += run_total(t.double().square() if euclidean else t.double().abs())
        mean = total / int(block.segment_numels[segment])
        scales[segment] = scale = torch.tensor(math.sqrt(mean) if euclidean else mean, dtype=torch.float32)
        for (_, start, stop, position), old, t in zip(runs, kept, values, strict=True):
            if scale.isfinite():
                negative[position : position + stop - start] = t < 0
                keep(old, t - torch.where(t < 0, -scale, scale))
            else:
                scales[segment] = torch.nan
                keep(old, t)
    packed = torch.cat((as_bytes(scales), pack(negative, 1)))
    payload.zero_()
    payload[: packed.numel()] = packed


def sign_decode(block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
    """See :meth:`gradwire.kernels.Kernels.sign_decode`."""
    head = 4 * block.segment_count
    scales = payloads[:, :head].contiguous().view(torch.float32)
    for segment in range(block.segment_count):
        for _, start, stop, position in flat_runs(block, segment):
            first, last = head + position // 8, head + -(-(position + stop - start) // 8)
            rows = [
                torch.where(unpack(payload[first:last], 1)[: stop - start] == 1, -scale, scale)
                for payload, scale in zip(payloads, scales[:, segment], strict=True)
            ]
            out[start:stop] = sum_in_order(rows) * weight
