"""Sparse sets merged pair by pair, so that what everybody ends with is no larger than what anybody sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.index import IndexCoding
from gradwire.codecs.select import TopMagnitudes
from gradwire.codecs.untouched import untouched
from gradwire.errors import PayloadError
from gradwire.layout import Block, Int64Array
from gradwire.memory import Feedback
from gradwire.wire.requests import Exchange, Synchronization


@dataclass(frozen=True)
class SparseSet:
    """Ascending positions and their values, ``counts[s]`` of them in segment ``s``."""

    positions: Tensor
    values: Tensor

    @classmethod
    def empty(cls, counts: Int64Array, device: torch.device) -> SparseSet:
        """Room for a set."""
        total = int(counts.sum())
        return cls(
            torch.empty(total, dtype=torch.int64, device=device), torch.empty(total, dtype=torch.float32, device=device)
        )

    def merged(self, other: SparseSet, counts: Int64Array) -> SparseSet:
        """The largest of the sum of both."""
        result = SparseSet.empty(counts, self.values.device)
        kernels.merge_top(
            counts, self.positions, self.values, other.positions, other.values, result.positions, result.values
        )
        return result

    def keep(self, positions: Tensor, flags: Tensor) -> None:
        """Clears the flags of ascending positions that the set has no finite value for."""
        kernels.survivors(positions, self.positions, self.values, flags)


@dataclass(frozen=True)
class SparseFormat:
    """A set as bytes: float32 values, then indices, then a flag for each value.

    Attributes:
        block: Which elements positions are of.
        counts: Values of each segment.
        indices: How positions are written.
    """

    block: Block
    counts: Int64Array
    indices: IndexCoding

    @property
    def total(self) -> int:
        """Values of a set."""
        return int(self.counts.sum())

    def write(self, content: SparseSet, flags: Tensor | None = None) -> Tensor:
        """The payload of a set and, where given, its flags."""
        values, size = 4 * self.total, self.indices.size(self.total, self.block.positions)
        flag_bytes = 0 if flags is None else -(-self.total // 32) * 4
        payload = torch.zeros(values + size + flag_bytes, dtype=torch.uint8, device=content.values.device)
        payload[:values].view(torch.float32).copy_(content.values)
        with untouched(content.positions, "positions", self.indices):
            self.indices.encode(content.positions, self.block.positions, payload[values : values + size])
        if flags is not None:
            packed = np.packbits(flags.cpu().numpy(), bitorder="little")
            payload[values + size : values + size + len(packed)] = torch.from_numpy(packed).to(payload.device)
        return payload

    def read(self, payload: Tensor) -> tuple[SparseSet, Tensor]:
        """A set, and the flags that follow it, if any.

        Raises:
            PayloadError: If positions are not ascending, or not as many in each segment as there should be.
        """
        values, size = 4 * self.total, self.indices.size(self.total, self.block.positions)
        content = SparseSet.empty(self.counts, payload.device)
        content.values.copy_(payload[:values].view(torch.float32))
        self.indices.decode(payload[values : values + size], self.block.positions, content.positions)
        self._check(content.positions)
        flags = np.unpackbits(payload[values + size :].cpu().numpy(), bitorder="little")[: self.total]
        return content, torch.from_numpy(flags.astype(bool)).to(payload.device)

    def _check(self, positions: Tensor) -> None:
        """A segment's positions lie within it, so that what is merged belongs together."""
        firsts = self.block.runs[self.block.segments[:-1], 2]
        lasts = self.block.runs[self.block.segments[1:] - 1, 1:].sum(1) - 1
        lows = torch.from_numpy(np.repeat(firsts, self.counts)).to(positions.device)
        highs = torch.from_numpy(np.repeat(lasts, self.counts)).to(positions.device)
        bad = (positions < lows) | (positions > highs)
        if bad.any():
            raise PayloadError(
                f"position {int(positions[bad][0])} lies outside the segment it was sent for; was it encoded with "
                "another configuration?"
            )


def partners(rank: int, world_size: int) -> Iterator[int]:
    """Whom a rank meets in the rounds between folding in and out; itself where it has nobody."""
    core = 1 << (world_size.bit_length() - 1)
    distance = 1
    while distance < core:
        yield rank ^ distance if rank < core else rank
        distance *= 2


def merge(
    select: TopMagnitudes,
    indices: IndexCoding,
    block: Block,
    gradient: Tensor,
    feedback: Feedback,
    rank: int,
    world_size: int,
) -> Synchronization:
    """Merges everybody's largest values in ``ceil(log2 n)`` rounds of one payload each, one more unless n is ``2**m``.

    In every round two groups of ranks that have a set each add their sets, the lower ranks' first, and keep the
    largest magnitudes; all members of both compute the same. Ranks beyond the largest power of two first fold their set
    into that of a lower rank, and in the end are given the result, and which values of that first merge are in it.

    A value counts as sent where every merge on its way kept its position. All others stay with the worker that had
    them: those that were dropped at once, and those dropped by one group whose position came back from another.

    Values travel divided by the power of two from n on, so that no sum is larger than float32 holds.

    Args:
        select: Which coordinates.
        indices: How positions are written.
        block: Which elements of ``gradient``.
        gradient: ``float32`` flat buffer; left with the average.
        feedback: This worker's memory.
        rank: This worker.
        world_size: n.
    """
    counts = select.counts(block)
    form = SparseFormat(block, counts, indices)
    core = 1 << (world_size.bit_length() - 1)
    extra = world_size - core

    own = SparseSet.empty(counts, gradient.device)
    admitted = feedback.before_encode(block, gradient)
    select.select(block, admitted, feedback, counts, own.positions, own.values)
    most = float(1 << (world_size - 1).bit_length())
    share = SparseSet(own.positions, own.values / most)
    current, sent = share, own.values.isfinite()
    folded, kept = share, sent.clone()

    if extra:
        partner = rank + core if rank < extra else rank - core if rank >= core else rank
        theirs, _ = form.read((yield Exchange(form.write(share), partner)))
        if partner != rank:
            low, high = (share, theirs) if rank < partner else (theirs, share)
            folded = current = low.merged(high, counts)
            current.keep(own.positions, sent)
            kept = current.values.isfinite()
    for partner in partners(rank, world_size) if world_size > 1 else [rank]:
        theirs, _ = form.read((yield Exchange(form.write(current), partner)))
        if partner != rank:
            low, high = (current, theirs) if rank < partner else (theirs, current)
            current = low.merged(high, counts)
            current.keep(own.positions, sent)
            if extra:
                current.keep(folded.positions, kept)
    if extra:
        partner = rank + core if rank < extra else rank - core if rank >= core else rank
        theirs, flags = form.read((yield Exchange(form.write(current, kept), partner)))
        if rank >= core:
            current = theirs
            SparseSet(folded.positions, torch.where(flags, 0.0, torch.nan)).keep(own.positions, sent)

    feedback.masked(block, own.positions[sent], own.values[sent])
    if feedback.residual is not None:
        kernels.subtract(block, feedback.residual, own.positions[sent], own.values[sent])
    feedback.after_encode(block, admitted)
    kernels.scatter_sum(block, current.positions[None], current.values[None], gradient, most / world_size)
    feedback.after_decode(block, gradient)
