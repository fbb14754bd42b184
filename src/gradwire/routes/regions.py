"""A sparse reduce by regions of the index space, then a gather of the largest sums: traffic does not grow with n."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.index import IndexCoding
from gradwire.codecs.select import TopMagnitudes
from gradwire.errors import PayloadError
from gradwire.layout import Block, Granularity, Int64Array, flat_slots
from gradwire.memory import Feedback
from gradwire.wire.requests import AllGather, AllReduceMean, AllToAll, Request


@dataclass(frozen=True, eq=False)
class Regions:
    """A block of one segment cut at ``edges[j]``, so that rank ``j`` reduces positions up to ``edges[j + 1]``.

    Attributes:
        edges: ``int64[n + 1]``, from 0 to the block's positions, not descending.
        capacity: Values that travel from one rank to another in one round.
        indices: How positions are written.
    """

    edges: Int64Array
    capacity: int
    indices: IndexCoding

    @classmethod
    def even(cls, positions: int, world_size: int, capacity: int, indices: IndexCoding) -> Regions:
        """Regions of nearly equal width."""
        return cls(np.arange(world_size + 1, dtype=np.int64) * positions // world_size, capacity, indices)

    def width(self, region: int) -> int:
        """Positions of a region."""
        return int(self.edges[region + 1] - self.edges[region])

    @property
    def payload_bytes(self) -> int:
        """Of ``capacity`` values and their positions in the widest region."""
        return 4 * self.capacity + max(self._index_bytes(region) for region in range(len(self.edges) - 1))

    def _index_bytes(self, region: int) -> int:
        return self.indices.size(self.capacity, self._universe(region))

    def _universe(self, region: int) -> int:
        """Positions of the region, and beyond them as many as might have to be filled up with."""
        return self.width(region) + self.capacity

    def write(self, region: int, positions: Tensor, values: Tensor, payload: Tensor) -> None:
        """Writes up to ``capacity`` ascending positions and their values, and zeros beyond the region for the rest."""
        room, start = 4 * self.capacity, int(self.edges[region])
        filled = len(positions)
        relative = torch.arange(self.capacity, device=payload.device) + (self.width(region) - filled)
        relative[:filled] = positions - start
        padded = values.new_zeros(self.capacity)
        padded[:filled] = values
        payload.zero_()
        payload[:room].view(torch.float32).copy_(padded)
        index_bytes = self._index_bytes(region)
        self.indices.encode(relative, self._universe(region), payload[room : room + index_bytes])

    def read(self, region: int, payload: Tensor) -> tuple[Tensor, Tensor]:
        """Positions within the block and their values; what only filled up has value zero and a position beyond.

        Raises:
            PayloadError: If positions are not ascending.
        """
        room = 4 * self.capacity
        relative = torch.empty(self.capacity, dtype=torch.int64, device=payload.device)
        index_bytes = self._index_bytes(region)
        self.indices.decode(payload[room : room + index_bytes], self._universe(region), relative)
        return relative, payload[:room].clone().view(torch.float32)


def balanced(positions: Tensor, block_positions: int, world_size: int) -> Tensor:
    """Where this worker would cut, so that each region has as many of its ``positions``: ``float32[n - 1]``."""
    cuts = torch.arange(1, world_size, device=positions.device)
    if not len(positions):
        return (cuts * block_positions / world_size).float()
    return positions[len(positions) * cuts // world_size].float()


def regions(
    select: TopMagnitudes,
    cut: Regions,
    recut: bool,
    block: Block,
    gradient: Tensor,
    feedback: Feedback,
    rank: int,
    world_size: int,
) -> Generator[Request | list[Request], Any, Regions]:
    """Reduces by regions, then gathers: under ``6 k`` words a worker at any n for the usual capacity of ``1.5 k / n``.

    Every worker sends its k largest values to the ranks that reduce their regions, at most ``capacity`` to each, its
    largest there. Every rank gives its ``capacity`` largest sums to all, and all keep the same k largest of them. A
    value counts as sent if it was sent to its region's rank and its position is among those k; all others stay with the
    worker that had them. Values travel divided by the power of two from n on, so that no sum is larger than float32
    holds.

    Args:
        select: Which coordinates.
        cut: The regions, how much travels, and how positions are written.
        recut: Whether to agree on regions anew, in a round of its own; then the generator returns them.
        block: Which elements of ``gradient``: one segment.
        gradient: ``float32`` flat buffer; left with the average.
        feedback: This worker's memory.
        rank: This worker.
        world_size: n.

    Returns:
        The regions that were used.

    Raises:
        PayloadError: If cuts are not finite or positions not ascending, or not of the block.
    """
    device, total = gradient.device, block.positions
    counts = select.counts(block)
    k = int(counts.sum())
    positions = torch.empty(k, dtype=torch.int64, device=device)
    values = torch.empty(k, dtype=torch.float32, device=device)
    admitted = feedback.before_encode(block, gradient)
    select.select(block, admitted, feedback, counts, positions, values)
    finite = _finite(values)

    if recut and world_size > 1:
        mean = yield AllReduceMean(balanced(positions if finite else positions[:0], total, world_size))
        if not mean.isfinite().all():
            raise PayloadError("the mean of where the workers would cut is not finite, which no worker's cuts are")
        inner = mean.double().cpu().numpy().round().clip(0, total).astype(np.int64)
        edges = np.concatenate(([0], np.maximum.accumulate(inner), [total]))
        cut = Regions(edges, cut.capacity, cut.indices)

    most = float(1 << (world_size - 1).bit_length())
    starts = torch.searchsorted(positions, torch.from_numpy(cut.edges).to(device)).tolist()
    outgoing = torch.empty((world_size, cut.payload_bytes), dtype=torch.uint8, device=device)
    travelling = torch.zeros(k, dtype=torch.bool, device=device)
    for region, row in enumerate(outgoing):
        low, high = starts[region : region + 2]
        chosen = low + largest(values[low:high] if finite else values[:0], cut.capacity)
        travelling[chosen] = True
        cut.write(region, positions[chosen], values[chosen] / most, row)
        if not finite:
            row[: 4 * cut.capacity].view(torch.float32).fill_(torch.nan)
    incoming = yield AllToAll(outgoing)

    payload = torch.empty(cut.payload_bytes, dtype=torch.uint8, device=device)
    places, sums, whole = _reduced(cut, rank, incoming)
    chosen = largest(sums, cut.capacity)
    cut.write(rank, places[chosen] + int(cut.edges[rank]), sums[chosen], payload)
    if not whole:
        payload[: 4 * cut.capacity].view(torch.float32).fill_(torch.nan)
    gathered = yield AllGather(payload, straight=True)

    found, result = [], []
    for region, row in enumerate(gathered):
        relative, added = cut.read(region, row)
        inside = int((relative < cut.width(region)).sum())
        whole = whole and _finite(added)
        found.append(relative[:inside] + int(cut.edges[region]))
        result.append(added[:inside])
    union, added = torch.cat(found), torch.cat(result)
    chosen = largest(added, k)
    union, added = union[chosen], added[chosen]
    if not whole:
        union, added = _first(block, k, device), torch.full((k,), torch.nan, device=device, dtype=torch.float32)

    kernels.survivors(positions, union, added, travelling)
    sent = positions[travelling]
    feedback.masked(block, sent, values[travelling])
    if feedback.residual is not None:
        kernels.subtract(block, feedback.residual, sent, values[travelling])
    feedback.after_encode(block, admitted)
    kernels.scatter_sum(block, union[None], added[None], gradient, most / world_size)
    feedback.after_decode(block, gradient)
    return cut


def _reduced(cut: Regions, rank: int, incoming: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Where in a rank's own region anybody has a value, their sums, in rank order, and whether these are finite.

    Sums may be zero: who sent values that cancel would send them again, larger, in every step if nobody took them.
    """
    width, shape = cut.width(rank), (len(incoming), cut.capacity)
    sums = torch.zeros(width, device=incoming.device, dtype=torch.float32)
    positions = torch.empty(shape, dtype=torch.int64, device=incoming.device)
    values = torch.empty(shape, device=incoming.device, dtype=torch.float32)
    for row, payload in enumerate(incoming):
        positions[row], values[row] = cut.read(rank, payload)
    if not _finite(values):
        return positions.new_empty(0), sums[:0], False
    places = torch.unique(positions[positions < width])
    if width:
        inside = (positions < width).sum(1).cpu().numpy()
        kernels.scatter_sum(_flat(width), positions, values, sums, 1.0, inside)
    return places, sums[places], _finite(sums)


def _finite(values: Tensor) -> bool:
    return not values.numel() or bool(torch.stack(torch.aminmax(values)).isfinite().all())


def largest(values: Tensor, count: int) -> Tensor:
    """Ascending indices of the ``count`` largest magnitudes, or of all; ties go to the lowest index."""
    if len(values) <= count:
        return torch.arange(len(values), device=values.device)
    chosen = torch.empty(count, dtype=torch.int64, device=values.device)
    counts, room = np.array([count], dtype=np.int64), values.new_empty(count)
    kernels.topk_select(_flat(len(values)), kernels.Compensated(values), counts, chosen, room)
    return chosen


@lru_cache(maxsize=256)
def _flat(numel: int) -> Block:
    return Block.cut(flat_slots([("values", (numel,))]), Granularity("layer"))


def _first(block: Block, count: int, device: torch.device) -> Tensor:
    """The first positions of a block."""
    places = [np.arange(position, position + length) for _, length, position in block.runs.tolist()]
    return torch.from_numpy(np.concatenate(places)[:count]).to(device)
