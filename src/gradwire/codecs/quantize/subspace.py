"""Levels of a dead-zone quantiser, of coordinates in directions that past averages had first, then of what is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.quantize.deadzone import DeadZone
from gradwire.codecs.quantize.directions import WHOLE, Directions, Rows, Subspaces, Together
from gradwire.deferred import Count, Flag, placed
from gradwire.errors import ConfigurationError
from gradwire.kernels.reference import deadzone_payload_bytes, deadzone_room, deadzone_tile
from gradwire.kernels.reference.deadzone import HEAD
from gradwire.layout import ALIGNMENT, Block, Slot
from gradwire.memory import Feedback, Store

MOST_BITS = 72.0
"""More than the codes of a value take."""

MOST_RANK = 64


@dataclass(frozen=True, eq=False)
class Home:
    """What the codec has for a block.

    Attributes:
        rows: Of all matrices.
        subspaces: Theirs and others'.
        work: Values as in the block's buffer, and at its end all coordinates.
        whole: The coordinates and then the values of ``work``, as one segment.
        layout: The same as two segments, or one if there are no coordinates.
    """

    rows: tuple[Rows, ...]
    subspaces: Subspaces
    work: Tensor
    whole: Block
    layout: Block

    @classmethod
    def of(cls, block: Block, subspaces: Subspaces, work: Tensor) -> Home:
        """For a block."""
        rows: list[Rows] = []
        for (start, length, _), origin, slot in zip(
            block.runs.tolist(), block.origins.tolist(), block.slot_of_run.tolist(), strict=True
        ):
            lies = Slot(block.slots[slot].name, (length,), start)
            rows.append(subspaces.directions[lies.name].within(origin, lies, rows[-1].stop if rows else 0))
        extra = rows[-1].stop if rows else 0
        coordinates = [Slot("coordinates", (extra,), len(work) - extra)] if extra else []
        whole = Block.cut([*coordinates, *(each.slot for each in rows)], WHOLE)
        return cls(
            rows=tuple(rows),
            subspaces=subspaces,
            work=work,
            whole=whole,
            layout=replace(whole, segments=np.array([0, 1, len(whole.runs)])) if extra else whole,
        )

    @cached_property
    def values(self) -> Block:
        """The values of ``work``."""
        return Block.cut([each.slot for each in self.rows], WHOLE)

    @cached_property
    def alone(self) -> Block:
        """The coordinates by themselves."""
        return Block.dense("coordinates", np.array([each.stop for each in self.rows[-1:]]))

    @cached_property
    def together(self) -> Together:
        """All rows."""
        return Together(self.rows, self.subspaces.bases)

    @cached_property
    def directed(self) -> Together:
        """Those that have coordinates."""
        return Together(tuple(each for each in self.rows if len(each.basis)), self.subspaces.bases)

    @cached_property
    def coordinates(self) -> Tensor:
        """Those at work."""
        return self.work[len(self.work) - self.alone.numel :]

    def spread(self, bits: float) -> float:
        """Bits for each value or coordinate, of so many for each value."""
        extra = sum(each.stop for each in self.rows[-1:])
        return bits * (self.whole.numel - extra) / self.whole.numel if extra else bits

    @cached_property
    def indices(self) -> Tensor:
        """``int64``: where each of the coordinates is among those of all matrices."""
        numbers = torch.arange(len(self.subspaces.read), device="cpu")
        parts = [each.in_matrix.own(numbers).flatten() for each in self.directed.rows]
        return placed(torch.cat(parts).numpy() if parts else np.empty(0, np.int64), self.work.device)

    def take(self, of_all: Tensor) -> None:
        """Has at work those of some coordinates of all matrices."""
        torch.index_select(of_all, 0, self.indices, out=self.coordinates)

    def give(self, coordinates: Tensor, of_all: Tensor) -> None:
        """Has among coordinates of all matrices these."""
        of_all.index_copy_(0, self.indices, coordinates)


@dataclass(frozen=True, eq=False)
class Rounded:
    """A block whose coordinates are rounded, while the rest is not.

    Attributes:
        home: What there is for it.
        payload: Where it is written.
        coordinates: As they were.
        left: What they are off by, as they will be read.
        scales: Of all.
        steps: Of the coordinates.
        points: Of levels.
        room: Bits for the rest.
        finite: Whether all values are.
    """

    home: Home
    payload: Tensor
    coordinates: Tensor
    left: Tensor
    scales: Tensor
    steps: Tensor
    points: tuple[int, int, int]
    room: int
    finite: bool | Flag


@dataclass(frozen=True, eq=False)
class SubspaceDeadZone(DeadZone):
    """Coordinates of each matrix's rows in a few directions, and what is left: levels of nearly the same step.

    Directions are learnt from the averages, which all ranks have, and so take no bytes. Coordinates are rounded before
    the rest is, which takes in what they are off by: so no more is left than there was.

    Attributes:
        bits: For each value, with the coordinates' share.
        rank: Directions of each matrix that is larger than its factors of that rank.
        slots: The parameters that it belongs to, once it is installed.
        subspaces: Their directions.
        work: Room for values and coordinates of any block.
        homes: What there is for each block.
        for_owners: How matrices are split for blocks of several owners.
    """

    rank: int = 4
    slots: tuple[Slot, ...] = ()
    subspaces: Subspaces | None = None
    work: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float32))
    homes: dict[Block, Home] = field(default_factory=dict)
    for_owners: dict[tuple[Block, ...], tuple[Together, bool]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.rank, int) and 1 <= self.rank <= MOST_RANK):
            raise ConfigurationError(
                f"rank={self.rank!r} is out of range; choose 1 to {MOST_RANK} directions, usually 4"
            )

    def installed(self, store: Store, slots: Sequence[Slot], numel: int) -> SubspaceDeadZone:
        """With directions of each parameter, and a buffer to work in."""
        subspaces = Subspaces.of(slots, self.rank, store)
        room = numel + ALIGNMENT * len(slots) + subspaces.drawn.numel()
        work = torch.zeros(room, dtype=torch.float32, device=store.device)
        return replace(self, slots=tuple(slots), subspaces=subspaces, work=work, homes={}, for_owners={})

    @property
    def directions(self) -> Mapping[str, Directions]:
        """Of each parameter, by name."""
        return self._subspaces.directions

    def payload_bytes(self, block: Block) -> int:
        """As many as without coordinates."""
        home = self._home(block)
        return deadzone_payload_bytes(home.layout, self._tile(home), home.spread(self.bits))

    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, payload: Tensor, key: int) -> None:
        """Splits rows, rounds coordinates by a step that suits both parts, and the rest by one that fits."""
        home = self._home(block)
        home.together.split(feedback.source(gradient), home.coordinates, home.work)
        rounded = self._round(home, payload)
        home.directed.add(rounded.left, home.work, home.work)
        self._write(rounded, block, gradient, feedback)

    def encode_each(
        self, blocks: Sequence[Block], gradient: Tensor, feedback: Feedback, payloads: Tensor, key: int
    ) -> None:
        """The same, but that rows are split, and get what coordinates are off by, matrix by matrix."""
        subspaces, homes, rounded = self._subspaces, [self._home(block) for block in blocks], []
        mine, work = subspaces.mine, homes[0].work
        together, torn = self._split_for(blocks)
        if torn:
            mine.zero_()
        together.split(feedback.source(gradient), mine, work)
        for block, home, payload in zip(blocks, homes, payloads, strict=True):
            home.take(mine)
            size = self.payload_bytes(block)
            payload[size:] = 0
            rounded.append(self._round(home, payload[:size]))
            home.give(rounded[-1].left, mine)
        subspaces.directed.add(mine, work, work)
        for block, written in zip(blocks, rounded, strict=True):
            self._write(written, block, gradient, feedback)

    def _split_for(self, blocks: Sequence[Block]) -> tuple[Together, bool]:
        """Rows as they are split for owners; and whether some that they have only parts of have no coordinates."""
        key = tuple(blocks)
        if key not in self.for_owners:
            rows = [each for block in blocks for each in self._home(block).rows]
            torn = {each.directions for each in rows if each.basis.shape[0] < each.directions.basis.shape[0]}
            whole = [each.rows for each in self.directions.values() if each not in torn]
            parts = [each.in_matrix for each in rows if each.directions in torn]
            self.for_owners[key] = Together((*whole, *parts), self._subspaces.bases), bool(torn)
        return self.for_owners[key]

    def _round(self, home: Home, payload: Tensor) -> Rounded:
        """Rounds the coordinates at work."""
        tile, coordinates = self._tile(home), home.coordinates.clone()
        scales = kernels.deadzone_scales(home.whole, kernels.Compensated(home.work))
        room = 8 * deadzone_room(home.layout, tile, payload)
        sample = kernels.deadzone_sample(home.whole, home.work, scales, room)
        step, points = kernels.deadzone_step(home.whole, sample, tile, room)
        left, steps, finite = coordinates.clone(), scales * step, scales.isfinite().all()
        if not len(left):
            return Rounded(home, payload, coordinates, left, scales, steps, points, room, finite)
        taken = self._off(home, left, steps, points)
        bits, known = torch.stack((taken, finite.to(taken.dtype))).tolist()  # at once, as the host waits for them
        return Rounded(home, payload, coordinates, left, scales, steps, points, max(room - bits, 0), bool(known))

    def _write(self, rounded: Rounded, block: Block, gradient: Tensor, feedback: Feedback) -> None:
        """Writes a block to whose rest has been added what coordinates are off by."""
        home, steps, scales, tile = rounded.home, rounded.steps, rounded.scales, self._tile(rounded.home)
        if len(rounded.left):
            home.coordinates.copy_(rounded.coordinates)
            sample = kernels.deadzone_sample(home.values, home.work, scales, rounded.room)
            finest, _ = kernels.deadzone_step(home.values, sample, tile, rounded.room)
            steps = torch.cat((steps, scales * finest))
        kernels.deadzone_encode(home.layout, home.work, True, steps, rounded.points, tile, rounded.payload)
        if feedback.residual is None:
            return
        if not rounded.finite:
            feedback.compensate(block, gradient)
            return
        if len(rounded.left):
            home.directed.add_some(home.coordinates - rounded.left, home.work)
        if kept := block.parts(feedback.residual):
            torch._foreach_copy_(kept, block.parts(home.work))

    def decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """Sums what levels stand for, and learns from it, but from an owner's share."""
        self._sum(block, payloads, out, weight)
        if block.slots == self.slots:
            self._learn(out)

    def decode_each(self, blocks: Sequence[Block], payloads: Tensor, out: Tensor) -> None:
        """What all owners' payloads stand for, matrix by matrix once all are read, and learns from it."""
        for block, payload in zip(blocks, payloads, strict=True):
            work = self._read(block, payload[None, : self.payload_bytes(block)], 1.0).work
        self._subspaces.whole.add(self._subspaces.read, work, out)
        self._learn(out)

    def _sum(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        home = self._read(block, payloads, weight)
        home.together.add(home.coordinates, home.work, out)

    def _read(self, block: Block, payloads: Tensor, weight: float) -> Home:
        """Has the sums of values and of coordinates at work, and notes the latter."""
        self.check(block, payloads)
        home = self._home(block)
        kernels.deadzone_decode(home.layout, payloads, self._tile(home), home.work, weight)
        home.give(home.coordinates, self._subspaces.read)
        return home

    def _learn(self, average: Tensor) -> None:
        self._subspaces.learn(average)

    def _off(self, home: Home, coordinates: Tensor, steps: Tensor, points: tuple[int, int, int]) -> Count:
        """Leaves of coordinates what they are off by as they will be read; returns how many bits their codes take."""
        block, tile = home.alone, self._tile(home)
        size = deadzone_payload_bytes(block, tile, MOST_BITS)
        payload = torch.empty(size, dtype=torch.uint8, device=coordinates.device)
        kernels.deadzone_encode(block, coordinates, True, steps, points, tile, payload)
        edge = size - deadzone_room(block, tile, payload)
        return payload[4 + HEAD : edge].view(torch.int32).sum()

    def _steps(self, block: Block) -> int:
        """Coordinates have a step, too."""
        return self._home(block).layout.segment_count

    def _tile(self, home: Home) -> int:
        return deadzone_tile(home.spread(self.bits))

    def _home(self, block: Block) -> Home:
        if block not in self.homes:
            self.homes[block] = Home.of(block, self._subspaces, self.work)
        return self.homes[block]

    @property
    def _subspaces(self) -> Subspaces:
        if self.subspaces is None:
            raise ConfigurationError("a subspace belongs to parameters; use what installed() returns")
        return self.subspaces
