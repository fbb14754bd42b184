"""A sparse codec is three choices: which coordinates, how their values are written, how their indices are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.capacity import INDEX_ROOM, Capacity
from gradwire.codecs.codec import Codec
from gradwire.codecs.index import EliasFano, IndexCoding
from gradwire.codecs.quantize.values import FloatValues, ValueCoding
from gradwire.codecs.select import Selector
from gradwire.codecs.untouched import untouched
from gradwire.layout import Block, Granularity, Int64Array, Slot, flat_slots
from gradwire.memory import Feedback, Remainder, Store


@dataclass(frozen=True)
class Sparse(Codec):
    """Selected coordinates of each segment; a payload is all values, then all indices.

    Where the length of indices varies they have a room that follows what the neediest rank wanted in the step before,
    and all they might need in the first step. What does not fit, the last coordinates, stays in the memory.

    Attributes:
        select: Which coordinates.
        values: How their values are written.
        indices: How their positions are written.
        room: For indices whose length varies: a share of what is always enough.
    """

    selects: ClassVar[bool] = True

    select: Selector
    values: ValueCoding = field(default_factory=FloatValues)
    indices: IndexCoding = field(default_factory=EliasFano)
    room: Capacity = INDEX_ROOM

    def remainder(self, most: int) -> Remainder:
        """That of the values: what is not chosen waits until it is."""
        return self.values.remainder(most)

    def at(self, step: int) -> Sparse:
        """With the selector's choice of this step."""
        return replace(self, select=self.select.at(step))

    def installed(self, store: Store, slots: Sequence[Slot], numel: int) -> Sparse:
        """With the store for the room."""
        return replace(self, room=replace(self.room, store=store))

    def owned(self) -> Sparse:
        """With a room of its own."""
        return replace(self, room=replace(self.room, kept_as=f"owner_{self.room.kept_as}"))

    def payload_bytes(self, block: Block) -> int:
        """What values and indices need."""
        _, chosen = _chosen(self.select, block)
        most = self.indices.size(chosen.numel, block.positions)
        if self.indices.varies:
            most = self.room.bytes(block, self.indices.size(0, block.positions), most)
        return self.values.size(chosen) + most

    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, payload: Tensor, key: int) -> None:
        """Selects, writes, and takes what was really written from the residual."""
        counts, chosen = _chosen(self.select, block)
        positions = torch.empty(chosen.numel, dtype=torch.int64, device=gradient.device)
        values = torch.empty(chosen.numel, dtype=torch.float32, device=gradient.device)
        self.select.select(block, gradient, feedback, counts, positions, values)
        edge = self.values.size(chosen)
        with untouched(values, "values", self.values):
            self.values.encode(chosen, values, payload[:edge], key)
        with untouched(positions, "positions", self.indices):
            written = self.indices.encode(positions, block.positions, payload[edge:])
        if feedback.residual is not None:
            sent = torch.empty_like(values)
            self.values.decode(chosen, payload[:edge], sent)
            feedback.leave(block, positions[:written], values[:written], sent[:written])

    def decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """Reads all payloads, checks their positions, then writes ``out`` once."""
        positions, values, filled = self.read(block, payloads)
        kernels.scatter_sum(block, positions, values, out, weight, filled)
        counts, _ = _chosen(self.select, block)
        for row in np.flatnonzero(filled < positions.shape[1]).tolist():
            _mark(block, counts, ~values[row].isfinite(), out)

    def read(self, block: Block, payloads: Tensor) -> tuple[Tensor, Tensor, Int64Array]:
        """Positions and values of all payloads, one row each, and how many positions each row has."""
        self.check(block, payloads)
        _, chosen = _chosen(self.select, block)
        edge = self.values.size(chosen)
        positions = torch.empty((len(payloads), chosen.numel), dtype=torch.int64, device=payloads.device)
        values = torch.empty((len(payloads), chosen.numel), dtype=torch.float32, device=payloads.device)
        filled = np.zeros(len(payloads), dtype=np.int64)
        for row, payload in enumerate(payloads):
            self.values.decode(chosen, payload[:edge], values[row])
            filled[row] = self.indices.decode(payload[edge:], block.positions, positions[row])
        return positions, values, filled

    @property
    def news_bytes(self) -> int:
        """A float32 where the length of indices varies."""
        return 4 if self.indices.varies else 0

    def news(self, block: Block, payloads: Tensor) -> Tensor:
        """Where the length of indices varies, a float32: the largest share wanted, or NaN if a value is not finite."""
        if not self.indices.varies:
            return super().news(block, payloads)
        _, chosen = _chosen(self.select, block)
        edge = self.values.size(chosen)
        values = torch.empty(chosen.numel, dtype=torch.float32, device=payloads.device)
        shares = []
        for payload in payloads:
            self.values.decode(chosen, payload[:edge], values)
            wanted = self.indices.wanted(payload[edge:], chosen.numel, block.positions)
            shares.append(wanted if bool(values.isfinite().all()) else torch.nan)
        return torch.tensor(shares, device=payloads.device, dtype=torch.float32).max().view(1).view(torch.uint8)

    def heard(self, block: Block, news: Tensor) -> None:
        """Keeps the share of the neediest with some to spare; the former one after values that are not finite."""
        if self.indices.varies:
            self.room.heard(block, float(news.contiguous().view(torch.float32).max()))


def _mark(block: Block, counts: Int64Array, bad: Tensor, out: Tensor) -> None:
    """Writes NaN to segments of which a value is not finite; its position may not have been written."""
    segments = np.repeat(np.arange(len(counts)), counts)[bad.cpu().numpy()]
    for segment in np.unique(segments).tolist():
        first, last = block.segments[segment : segment + 2].tolist()
        for start, length, _ in block.runs[first:last].tolist():
            out[start : start + length] = torch.nan


_KEPT = 4
"""Selectors that are remembered of a block: the worker's and the owner's, now and in the step before."""

_CHOSEN: WeakKeyDictionary[Block, dict[Selector, tuple[Int64Array, Block]]] = WeakKeyDictionary()
"""What was found of each block: there are as many as parameters have owners, each asked for in every step."""


def _chosen(select: Selector, block: Block) -> tuple[Int64Array, Block]:
    """How many coordinates of each segment are sent, and the block that their values form."""
    known = _CHOSEN.setdefault(block, {})
    if select not in known:
        counts = select.counts(block)
        name = "".join(f"{slot.name}{slot.part}" for slot in block.slots[:1])  # an owner may own nothing
        streams = [f"values of segment {segment} with {name}" for segment in range(len(counts))]
        slots = flat_slots([(stream, (int(count),)) for stream, count in zip(streams, counts, strict=True)])
        if len(known) == _KEPT:  # a warm-up chooses otherwise in every step
            del known[next(iter(known))]
        known[select] = counts, Block.cut(slots, Granularity("layer"))
    return known[select]
