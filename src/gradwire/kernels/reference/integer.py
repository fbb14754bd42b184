"""Levels of a scale that all workers share, so that codes add up."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.reference._torch import compensated, flat_runs, keep, pack, unpack
from gradwire.kernels.reference.stochastic import LARGEST_SCALE, SMALLEST_SCALE
from gradwire.layout import Block
from gradwire.randomness import hash32, run_keys


def _pieces(block: Block, bucket: int) -> list[list[tuple[int, int, int, int]]]:
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


def integer_scales(
    block: Block, gradient: Tensor, residual: Tensor | None, beta: float, gamma: float, bucket: int, scales: Tensor
) -> None:
    """See :meth:`gradwire.kernels.Kernels.integer_scales`."""
    for number, pieces in enumerate(_pieces(block, bucket)):
        largest = torch.zeros((), device=gradient.device)
        for run, first, last, _ in pieces:
            start = int(block.runs[run, 0])
            kept = None if residual is None else residual[start + first : start + last]
            t = compensated(gradient[start + first : start + last], kept, beta, gamma)
            infinite = torch.full_like(largest, torch.inf)
            largest = torch.maximum(largest, t.abs().max() if t.isfinite().all() else infinite)
            keep(kept, t)
        scales[number] = largest


def _step(scale: Tensor, levels: int) -> Tensor:
    """What one level is worth: 0 for a bucket too small to divide by, NaN for one that is not finite."""
    if not scale.isfinite():
        return torch.full_like(scale, torch.nan)
    clamped = scale.clamp(max=LARGEST_SCALE)
    return torch.where(scale >= SMALLEST_SCALE, clamped / torch.full_like(scale, levels), torch.zeros_like(scale))


def integer_encode(
    block: Block, values: Tensor, subtract: bool, scales: Tensor, levels: int, bits: int, bucket: int, codes: Tensor,
    key: int,
) -> None:  # fmt: skip
    """See :meth:`gradwire.kernels.Kernels.integer_encode`. A level is drawn as in a stochastic payload."""
    keys = run_keys(key, block.streams).tolist()
    unpacked = torch.zeros(block.positions, dtype=torch.uint8, device=values.device)
    for scale, pieces in zip(scales, _pieces(block, bucket), strict=True):
        step = _step(scale, levels)
        if step.isnan():
            continue
        clamped = scale.clamp(max=LARGEST_SCALE)
        inverse = torch.full_like(scale, levels) / clamped if step > 0 else torch.zeros_like(scale)
        for run, first, last, position in pieces:
            start = int(block.runs[run, 0])
            t = values[start + first : start + last]
            counters = torch.arange(first, last, device=values.device) + int(block.origins[run])
            uniform = ((hash32(keys[run], counters) >> 16).float() * 2.0**-16 + 2.0**-17) + levels
            code = (t * inverse + uniform).to(torch.int32).clamp(max=2 * levels)
            unpacked[position : position + last - first] = code.to(torch.uint8)
            if subtract:
                t.sub_((code - levels).float() * step)
    codes.copy_(pack(unpacked, bits))


def integer_decode(
    block: Block, scales: Tensor, codes: Tensor, out: Tensor, levels: int, bits: int, bucket: int, workers: int
) -> None:
    """See :meth:`gradwire.kernels.Kernels.integer_decode`."""
    sums = unpack(codes, bits).clamp(max=2 * levels * workers) - levels * workers
    for scale, pieces in zip(scales, _pieces(block, bucket), strict=True):
        step = _step(scale, levels) * torch.tensor(1 / workers, dtype=torch.float32)
        for run, first, last, position in pieces:
            start = int(block.runs[run, 0])
            out[start + first : start + last] = sums[position : position + last - first].float() * step
