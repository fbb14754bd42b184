"""What the reference kernels share: compensated values, defined sums, packed bits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.kernels.compensated import Compensated
from gradwire.layout import Block
from gradwire.randomness import hash32

CHUNK = 4096
"""Elements of a run that are added up before their sum goes on to the segment's, and as many such sums."""

LANES = 32
"""Interleaved partial sums within a chunk."""

SMALLEST_SCALE = 2.0**-118
"""A segment with a smaller norm is sent as zeros: dividing by it would overflow."""

LARGEST_SCALE = (2 - 2.0**-21) * 2.0**127
"""A larger scale counts as this one: decoding the highest level would overflow."""


def flat_runs(block: Block, segment: int) -> list[tuple[int, int, int, int]]:
    """Number, start, one past the last element, and position of each run of a segment."""
    first, last = block.segments[segment : segment + 2].tolist()
    return [
        (run, start, start + length, position)
        for run, (start, length, position) in enumerate(block.runs[first:last].tolist(), first)
    ]


def formed(source: Compensated, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
    """``t`` between two elements, each product and the sum rounded to float32; and where the residual lies, if any."""
    gradient = source.gradient[start:stop]
    if source.residual is None:
        return gradient.clone(), None
    residual = source.residual[start:stop]
    return residual * source.beta + gradient * source.gamma, residual


def keep(residual: Tensor | None, values: Tensor) -> None:
    """Leaves the finite ``values`` in the residual."""
    if residual is not None:
        residual.copy_(torch.where(values.isfinite(), values, residual))


class Piece(NamedTuple):
    """One run of a segment.

    Attributes:
        run: Its number in the block.
        span: Its positions.
        t: Its compensated values.
        memory: Where its residual lies, if there is one.
    """

    run: int
    span: slice
    t: Tensor
    memory: Tensor | None


def pieces_of(block: Block, segment: int, source: Compensated) -> list[Piece]:
    """The runs of a segment with their compensated values."""
    pieces = []
    for run, start, stop, position in flat_runs(block, segment):
        t, memory = formed(source, start, stop)
        pieces.append(Piece(run, slice(position, position + stop - start), t, memory))
    return pieces


def keep_all(pieces: list[Piece]) -> None:
    """Leaves a segment of which nothing is sent in the residual."""
    for piece in pieces:
        keep(piece.memory, piece.t)


def keep_rest(pieces: list[Piece], sent: Tensor) -> None:
    """Leaves in the residual what was not sent; all of it where what is read at a position is not finite."""
    for piece in pieces:
        there = sent[piece.span]
        keep(piece.memory, torch.where(there.isfinite(), piece.t - there, piece.t))


def largest(values: list[Tensor]) -> float:
    """The largest magnitude of some runs; NaN if any value is not finite."""
    if not all(bool(t.isfinite().all()) for t in values):
        return torch.nan
    return max(float(t.abs().max()) for t in values)


def draws(block: Block, keys: list[int], piece: Piece) -> Tensor:
    """32 random bits for each element of a run, as int64."""
    counters = torch.arange(piece.t.numel(), device=piece.t.device) + int(block.origins[piece.run])
    return hash32(keys[piece.run], counters)


def segment_of_positions(block: Block, device: torch.device) -> Tensor:
    """The segment of every position, as int64; 0 in gaps."""
    numbers = torch.zeros(block.positions, dtype=torch.int64, device=device)
    for segment in range(block.segment_count):
        for _, start, stop, position in flat_runs(block, segment):
            numbers[position : position + stop - start] = segment
    return numbers


def write_mean(block: Block, rows: Tensor, out: Tensor, weight: float) -> None:
    """``out = weight * sum of rows`` of ``float32[n, positions]``, in row order."""
    for start, length, position in block.runs.tolist():
        out[start : start + length] = sum_in_order(list(rows[:, position : position + length])) * weight


def write_payload(payload: Tensor, *parts: Tensor) -> None:
    """Fills a payload with the bytes of ``parts``, then zeros."""
    packed = torch.cat([as_bytes(part) for part in parts])
    payload.zero_()
    payload[: packed.numel()] = packed


def segment_total(runs: list[Tensor]) -> float:
    """Sum of a segment's runs of float64 in a defined order that vectorises.

    Element ``i`` of a chunk goes to lane ``i % LANES``, in order; lanes are added pairwise, the upper half to the lower
    half, until one is left. The totals of all runs' chunks are added up as elements are, ``CHUNK`` of them at a time;
    what that comes to is added in order.
    """
    total = 0.0
    for group in _chunk_totals(torch.cat([_chunk_totals(run) for run in runs])).tolist():
        total += group
    return total


def _chunk_totals(values: Tensor) -> Tensor:
    chunks = -(-values.numel() // CHUNK)
    size = CHUNK if chunks > 1 else -(-values.numel() // LANES) * LANES  # zeros beyond it would change no lane
    rows = torch.nn.functional.pad(values, (0, chunks * size - values.numel())).view(chunks, -1, LANES)
    lanes = torch.zeros(chunks, LANES, dtype=torch.float64, device=values.device)
    for row in rows.unbind(1):
        lanes += row
    while lanes.shape[1] > 1:
        low, high = lanes.chunk(2, dim=1)
        lanes = low + high
    return lanes.flatten()


def as_bytes(values: Tensor) -> Tensor:
    """The bytes of a tensor, as a flat view."""
    return values.contiguous().view(torch.uint8).flatten()


def padded(size: int) -> int:
    """The next multiple of 4 bytes."""
    return -(-size // 4) * 4


def pack(codes: Tensor, bits: int) -> Tensor:
    """Packs codes of ``bits`` bits into bytes, lowest bits first."""
    groups = codes.view(-1, 8 // bits).to(torch.int32)
    shifts = torch.arange(0, 8, bits, dtype=torch.int32, device=codes.device)
    packed: Tensor = (groups << shifts).sum(1).to(torch.uint8)
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Inverse of :func:`pack`, as int32."""
    shifts = torch.arange(0, 8, bits, dtype=torch.int32, device=packed.device)
    codes: Tensor = (packed.to(torch.int32)[:, None] >> shifts) & (2**bits - 1)
    return codes.flatten()


def sum_in_order(rows: list[Tensor]) -> Tensor:
    """``((row0 + row1) + row2) + ...`` in float32."""
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total
