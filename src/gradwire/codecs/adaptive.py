"""Sparse codecs that send as many coordinates as the values ask for, in payloads of a size known beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.capacity import INDEX_ROOM, Capacity, following
from gradwire.codecs.codec import Codec
from gradwire.codecs.index import EliasFano, IndexCoding
from gradwire.codecs.quantize.values import FloatValues, ValueCoding
from gradwire.codecs.select.criterion import Criterion
from gradwire.codecs.untouched import untouched
from gradwire.errors import ConfigurationError, PayloadError
from gradwire.layout import Block, Int64Array, Slot
from gradwire.memory import Feedback, Kind, Remainder, Store

LEAST = 16
"""No parameter's capacity falls below this, unless it is smaller itself."""

NOT_FINITE = 2**32 - 1
"""The count that says that a parameter has a value that is not finite."""


@dataclass(frozen=True)
class AdaptiveSparse(Codec):
    """All coordinates that meet a criterion, up to a capacity on which all ranks agree.

    A payload is, for every parameter, how many of its coordinates met the criterion (uint32, little-endian, or
    :data:`NOT_FINITE`); then values, then indices, each in the room that the capacity takes at most. All ranks see all
    counts, which makes the capacity of the next step. Where more is wanted than fits, the largest magnitudes go, and
    the rest waits in the memory. Where the length of indices varies, so does their room, as in :class:`Sparse`.

    Attributes:
        criterion: Which coordinates.
        capacity: How many of each parameter's fit in the first step, as a share of its elements.
        values: How their values are written.
        indices: How their positions are written.
        store: Where capacities are kept, by parameter; the first one always holds if None.
        index_room: For indices whose length varies: a share of what is always enough.
    """

    selects: ClassVar[bool] = True

    criterion: Criterion
    capacity: float
    values: ValueCoding = field(default_factory=FloatValues)
    indices: IndexCoding = field(default_factory=EliasFano)
    store: Store | None = None
    index_room: Capacity = INDEX_ROOM

    def __post_init__(self) -> None:
        if not 0 < self.capacity <= 1:
            raise ConfigurationError(
                f"capacity={self.capacity!r} is out of range; choose 0 < capacity <= 1, the share of coordinates that "
                "fits in the first step, for example 0.02"
            )

    def remainder(self, most: int) -> Remainder:
        """That of the values: what does not meet the criterion waits until it does."""
        return self.values.remainder(most)

    def installed(self, store: Store, slots: Sequence[Slot], numel: int) -> AdaptiveSparse:
        """With the criterion, and the store for capacities and rooms."""
        criterion, room = self.criterion.installed(store, slots, numel), replace(self.index_room, store=store)
        return replace(self, criterion=criterion, store=store, index_room=room)

    def room(self, block: Block) -> int:
        """How many coordinates fit in this step."""
        enough = self.criterion.enough(block)
        return enough if enough is not None else sum(self._room_of(slot) for slot in block.slots)

    def payload_bytes(self, block: Block) -> int:
        """Counts, values, indices."""
        _, _, size = self._edges(block)
        return size

    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, payload: Tensor, key: int) -> None:
        """Chooses, writes, and takes what was really written from the residual."""
        head, edge, _ = self._edges(block)
        room = self.room(block)
        choice = self.criterion.choose(block, gradient, feedback, room, key)
        positions, values = choice.positions, choice.values
        wanted = _wanted(block, choice.counts)
        if (wanted == NOT_FINITE).any():
            sendable = _among(block, positions, wanted != NOT_FINITE)
            positions, values = positions[sendable], values[sendable]
        if len(positions) > room:
            positions, values = _largest(positions, values, room)
        payload.zero_()
        size = min(self.indices.size(len(positions), block.positions), payload.numel() - edge)
        with untouched(positions, "positions", self.indices):
            fitted = self.indices.encode(positions, block.positions, payload[edge : edge + size])
        positions, values = positions[:fitted], values[:fitted]
        chosen = _chosen(block, positions)
        written = values
        if choice.magnitudes is not None:
            of_chosen = np.repeat(choice.magnitudes[_lengths(block, positions) > 0], chosen.segment_numels)
            written = self.criterion.sends(values, torch.from_numpy(of_chosen).to(values.device))
        payload[:head].view(torch.int32).copy_(_packed(wanted))
        coded = payload[head : head + self.values.size(chosen)]
        with untouched(written, "values", self.values):
            self.values.encode(chosen, written, coded, key)
        self.criterion.sent(block, positions, values)
        if feedback.residual is not None:
            sent = torch.empty_like(values)
            self.values.decode(chosen, coded, sent)
            feedback.leave(block, positions, values, sent)

    def decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """Reads all payloads, checks counts and positions, then writes ``out`` once."""
        self.check(block, payloads)
        head, edge, end = self._edges(block)
        room = self.room(block)
        wanted = np.stack([_unpacked(payload[:head]) for payload in payloads])
        finite = wanted != NOT_FINITE
        numels = np.array([slot.numel for slot in block.slots])
        if (finite & (wanted > numels)).any():
            raise PayloadError("a payload counts more coordinates of a parameter than it has")
        filled = np.minimum(np.where(finite, wanted, 0).sum(1), room)
        shape = (len(payloads), int(filled.max()))
        positions = torch.empty(shape, dtype=torch.int64, device=out.device)
        values = torch.empty(shape, dtype=torch.float32, device=out.device)
        index_share = 0.0
        for row, (payload, count) in enumerate(zip(payloads, filled.tolist(), strict=True)):
            coded = payload[edge : min(edge + self.indices.size(count, block.positions), end)]
            filled[row] = self.indices.decode(coded, block.positions, positions[row, :count])
            index_share = max(index_share, self.indices.wanted(coded, count, block.positions))
            count = int(filled[row])
            chosen = _chosen(block, positions[row, :count])
            if chosen.numel != count:
                raise PayloadError(f"of {count} positions {count - chosen.numel} lie in no run of the block")
            self.values.decode(chosen, payload[head : head + self.values.size(chosen)], values[row, :count])
        kernels.scatter_sum(block, positions, values, out, weight, filled)
        for run in np.flatnonzero(~finite.all(0)[block.slot_of_run]).tolist():
            start, length, _ = block.runs[run].tolist()
            out[start : start + length] = torch.nan
        self._learn(block, np.where(finite, wanted, -1), index_share)

    def _edges(self, block: Block) -> tuple[int, int, int]:
        """Where values start, where indices start, and the size of a payload."""
        room = self.room(block)
        head = 4 * len(block.slots)
        edge = head + self.values.bound(room, block.segment_count)
        most = self.indices.bound(room, block.positions)
        if self.indices.varies:
            most = self.index_room.bytes(block, self.indices.bound(0, block.positions), most)
        return head, edge, edge + most

    def _room_of(self, slot: Slot) -> int:
        kept = None if self.store is None else self.store.get("capacity", slot.name)
        capacity = 0 if kept is None else int(kept)
        return capacity or _within(slot, self.capacity * slot.numel)

    def _learn(self, block: Block, wanted: Int64Array, index_share: float) -> None:
        """Makes capacities and rooms of the next step; a parameter that is not finite on some rank keeps its own."""
        if self.store is None:
            return
        rows = wanted.max(0).tolist(), wanted.min(0).tolist()
        if self.criterion.enough(block) is None:
            for slot, most, least in zip(block.slots, *rows, strict=True):
                capacity = self._room_of(slot)
                if least >= 0:
                    capacity = _within(slot, following(capacity, most))
                self.store.put("capacity", slot.name, torch.tensor(capacity), Kind.SHARED)
        if self.indices.varies and index_share and wanted.min() >= 0:
            self.index_room.heard(block, index_share)


def _within(slot: Slot, capacity: float) -> int:
    return min(slot.numel, max(LEAST, int(np.ceil(capacity))))


def _largest(positions: Tensor, values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest magnitudes, ties to the lowest position."""
    all_of_them = Block.dense("wanted", np.array([len(values)]))
    kept = torch.empty(count, dtype=torch.int64, device=values.device)
    largest = torch.empty(count, dtype=torch.float32, device=values.device)
    kernels.topk_select(all_of_them, kernels.Compensated(values), np.array([count]), kept, largest)
    return positions[kept], largest


def _lengths(block: Block, positions: Tensor) -> Int64Array:
    """How many of some ascending positions lie in each segment: ``int64[S]``."""
    if not block.segment_count:
        return np.zeros(0, dtype=np.int64)
    places = positions.cpu().numpy()
    ends = np.searchsorted(places, block.runs[:, 2] + block.runs[:, 1])
    lengths: Int64Array = np.add.reduceat(ends - np.searchsorted(places, block.runs[:, 2]), block.segments[:-1])
    return lengths


def _chosen(block: Block, positions: Tensor) -> Block:
    """The block that the values at some positions form: one segment for each that has any."""
    return Block.dense(f"values chosen from {block.slots[0].name}", _lengths(block, positions))


def _among(block: Block, positions: Tensor, slots: np.ndarray[Any, np.dtype[np.bool_]]) -> Tensor:
    """Which of some positions lie in one of the slots chosen: ``bool[k]``."""
    runs = np.searchsorted(block.runs[:, 2], positions.cpu().numpy(), side="right") - 1
    return torch.from_numpy(slots[block.slot_of_run[runs]]).to(positions.device)


def _wanted(block: Block, counts: Int64Array) -> Int64Array:
    """From counts of runs to counts of slots."""
    wanted = np.bincount(block.slot_of_run, np.maximum(counts, 0), len(block.slots)).astype(np.int64)
    wanted[block.slot_of_run[counts < 0]] = NOT_FINITE
    return wanted


def _packed(counts: Int64Array) -> Tensor:
    return torch.from_numpy(counts.astype(np.uint32).view(np.int32))


def _unpacked(head: Tensor) -> Int64Array:
    counts: Int64Array = head.cpu().contiguous().numpy().view(np.uint32).astype(np.int64)
    return counts
