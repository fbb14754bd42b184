"""Stochastic levels."""

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
from gradwire.randomness import hash32, run_keys

SMALLEST_SCALE = 2.0**-118
"""A bucket with a smaller norm is sent as zeros: dividing by it would overflow."""

LARGEST_SCALE = (2 - 2.0**-21) * 2.0**127
"""A larger scale counts as this one: decoding the highest level would overflow."""


def _buckets(block: Block, bucket: int) -> list[list[tuple[int, int, int, int]]]:
    """The pieces (run, first element in the run, one past the last, position) of each bucket."""
    if not bucket:
        return [
            [(run, 0, stop - start, position) for run, start, stop, position in flat_runs(block, segment)]
            for segment in range(block.segment_count)
        ]
    return [
        [(run, first, min(first + bucket, length), position + first)]
        for run, (_, length, position) in enumerate(block.runs.tolist())
        for first in range(0, length, bucket)
    ]


def stochastic_bucket_count(block: Block, bucket: int) -> int:
    """Number of scales in a stochastic payload."""
    return int((-(-block.runs[:, 1] // bucket)).sum()) if bucket else block.segment_count


def stochastic_payload_bytes(block: Block, bits: int, bucket: int) -> int:
    """See :meth:`gradwire.kernels.Kernels.stochastic_payload_bytes`."""
    return padded(4 * stochastic_bucket_count(block, bucket) + block.positions * bits // 8)


def _step(scale: Tensor, levels: int) -> Tensor:
    """What one level is worth."""
    return scale.clamp(-LARGEST_SCALE, LARGEST_SCALE) / torch.full_like(scale, levels)


def stochastic_encode(
    block: Block,
    gradient: Tensor,
    residual: Tensor | None,
    beta: float,
    gamma: float,
    payload: Tensor,
    bits: int,
    bucket: int,
    euclidean: bool,
    key: int,
    nearest: bool = False,
) -> None:
    """See :meth:`gradwire.kernels.Kernels.stochastic_encode`.

    The level of ``x = t / scale * s`` is ``floor(x + u)``, formed as ``floor(x + (s + u)) - s`` in float32, with ``u``
    the middle of one of ``2**16`` equal parts of [0, 1): level ``floor(x) + 1`` has the probability ``x - floor(x)``,
    rounded to 16 bits. To the ``nearest`` level, ``u`` is 1/2.
    """
    levels = 2 ** (bits - 1) - 1
    keys = run_keys(key, block.streams).tolist()
    buckets = _buckets(block, bucket)
    scales = torch.zeros(len(buckets), device=gradient.device)
    codes = torch.zeros(block.positions, dtype=torch.uint8, device=gradient.device)
    for number, pieces in enumerate(buckets):
        starts = [int(block.runs[run, 0]) + first for run, first, _, _ in pieces]
        stops = [int(block.runs[run, 0]) + last for run, _, last, _ in pieces]
        kept = [None if residual is None else residual[a:b] for a, b in zip(starts, stops, strict=True)]
        values = [compensated(gradient[a:b], old, beta, gamma) for a, b, old in zip(starts, stops, kept, strict=True)]
        scales[number] = scale = _norm(values, euclidean)
        if scale.isnan():
            for t, old in zip(values, kept, strict=True):
                keep(old, t)
            continue
        step = _step(scale, levels)
        inverse = torch.full_like(scale, levels) / scale if scale > 0 else torch.zeros_like(scale)
        for (run, first, last, position), t, old in zip(pieces, values, kept, strict=True):
            counters = torch.arange(first, last, device=gradient.device) + int(block.origins[run])
            uniform = (hash32(keys[run], counters) >> 16).float() * 2.0**-16 + 2.0**-17
            offset = torch.full_like(t, 0.5) if nearest else uniform
            code = (t * inverse + (offset + levels)).to(torch.int32).clamp(max=2 * levels)
            codes[position : position + last - first] = code.to(torch.uint8)
            keep(old, t - (code - levels).float() * step)
    packed = torch.cat((as_bytes(scales), pack(codes, bits)))
    payload.zero_()
    payload[: packed.numel()] = packed


def _norm(values: list[Tensor], euclidean: bool) -> Tensor:
    """The scale of a bucket's pieces: NaN if any value is not finite, 0 if too small."""
    if not all(bool(t.isfinite().all()) for t in values):
        return values[0].new_tensor(torch.nan)
    if euclidean:
        total = 0.0
        for t in values:
            total += run_total(t.double().square())
        norm = math.sqrt(total)
    else:
        norm = max(float(t.abs().max()) for t in values)
    return values[0].new_tensor(min(norm, LARGEST_SCALE) if norm >= SMALLEST_SCALE else 0.0)


def stochastic_decode(block: Block, payloads: Tensor, out: Tensor, weight: float, bits: int, bucket: int) -> None:
    """See :meth:`gradwire.kernels.Kernels.stochastic_decode`."""
    levels = 2 ** (bits - 1) - 1
    buckets = _buckets(block, bucket)
    head = 4 * len(buckets)
    steps = _step(payloads[:, :head].contiguous().view(torch.float32), levels)
    codes = [
        (unpack(payload[head : head + block.positions * bits // 8], bits).clamp(max=2 * levels) - levels).float()
        for payload in payloads
    ]
    for number, pieces in enumerate(buckets):
        for run, first, last, position in pieces:
            start = int(block.runs[run, 0])
            rows = [
                code[position : position + last - first] * step
                for code, step in zip(codes, steps[:, number], strict=True)
            ]
            out[start + first : start + last] = sum_in_order(rows) * weight
