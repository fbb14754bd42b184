"""Levels of a dead-zone quantiser, of coordinates in directions that past averages had first, then of what is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.lowrank import as_rows, gains, orthonormal_rows, scaled_rows
from gradwire.codecs.quantize.deadzone import DeadZone
from gradwire.errors import ConfigurationError
from gradwire.kernels.reference import deadzone_payload_bytes, deadzone_room, deadzone_tile
from gradwire.kernels.reference.deadzone import HEAD
from gradwire.layout import ALIGNMENT, Block, Granularity, Slot
from gradwire.memory import Feedback, Kind, Store
from gradwire.randomness import gaussian

MOST_BITS = 72.0
"""More than the codes of a value take."""

MOST_RANK = 64

WHOLE = Granularity("model")


@dataclass(frozen=True, eq=False)
class Directions:
    """A few directions in the space of a matrix's rows, the same on every rank; or none.

    Attributes:
        block: The matrix, ``[n, m]``.
        basis: ``float32[r, m]``: orthonormal rows, all zero as long as nothing is known.
        drawn: ``float32[r, n]``: weights of rows that begin a direction.
        read: ``float32[r, n]``: coordinates of an average's rows as all ranks have read them.
        mine: ``float32[r, n]``: of this worker's rows, while they are written for several owners.
    """

    block: Block
    basis: Tensor
    drawn: Tensor
    read: Tensor
    mine: Tensor

    @classmethod
    def of(cls, slot: Slot, rank: int, store: Store) -> Directions:
        """A parameter's; its basis is kept under its name."""
        rank = rank if gains(slot.shape, rank) else 0
        n, m = as_rows(slot.shape) if rank else (1, slot.numel)
        start, drawn = torch.zeros(rank, m, dtype=torch.float32), gaussian(slot.stream, rank * n).view(rank, n)
        (basis,) = store.stacked("basis", [slot.name], lambda _: start, Kind.SHARED) if rank else [start]
        drawn = drawn.to(store.device)
        read, mine = torch.zeros_like(drawn), torch.zeros_like(drawn)
        return cls(Block.cut([slot], WHOLE), basis.to(store.device), drawn, read, mine)

    def within(self, origin: int, slot: Slot, first: int) -> Rows:
        """Some of its rows; what an owner has of a matrix of fewer rows than owners is a row without directions.

        Args:
            origin: Of the first element in the matrix.
            slot: Where they lie.
            first: Of their coordinates among those of all matrices.
        """
        rank, m = self.basis.shape
        if not rank or origin % m or slot.numel % m:
            return Rows(self, slot, self.basis[:0].reshape(0, slot.numel), 0, 1, first)
        return Rows(self, slot, self.basis, origin // m, slot.numel // m, first)

    def learn(self, average: Tensor) -> None:
        """One step of subspace iteration on an average, by its coordinates as all ranks have read them.

        A direction of which there was nothing is begun anew, as a random combination of rows (Halko et al. 2011,
        arXiv:0909.4061).
        """
        if not len(self.basis):
            return
        weights = torch.where((self.read != 0).any(1, keepdim=True), self.read, self.drawn)
        found = torch.empty_like(self.basis)
        kernels.combine_rows(self.block, scaled_rows(weights), average, found)
        (basis,) = orthonormal_rows(found[None])
        self.basis.copy_(torch.where(basis.isfinite().all(), basis, self.basis))


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a matrix that a block has.

    Attributes:
        directions: The matrix's.
        slot: Where they lie.
        basis: The directions' that they have.
        origin: The first of them.
        count: How many.
        first: Of their coordinates among those of all matrices.
    """

    directions: Directions
    slot: Slot
    basis: Tensor
    origin: int
    count: int
    first: int

    @cached_property
    def block(self) -> Block:
        """They alone."""
        return Block.cut([self.slot], WHOLE)

    @property
    def stop(self) -> int:
        """One past the last coordinate."""
        return self.first + self.basis.shape[0] * self.count

    def own(self, coordinates: Tensor) -> Tensor:
        """Theirs of all matrices' coordinates, ``float32[r, count]``."""
        return coordinates[self.first : self.stop].view(self.basis.shape[0], self.count)

    def add(self, coordinates: Tensor, values: Tensor, out: Tensor) -> None:
        """``out`` is ``values`` and what coordinates stand for."""
        kernels.add_product(self.block, self.own(coordinates), self.basis, values, out)

    def of(self, matrix: Tensor) -> Tensor:
        """Theirs of the coordinates of their matrix's rows, ``float32[r, count]``."""
        return matrix[: self.basis.shape[0], self.origin : self.origin + self.count]


@dataclass(frozen=True, eq=False)
class Home:
    """What the codec has for a block.

    Attributes:
        rows: Of all matrices.
        work: Values as in the block's buffer, and at its end all coordinates.
        whole: The coordinates and then the values of ``work``, as one segment.
        layout: The same as two segments, or one if there are no coordinates.
    """

    rows: tuple[Rows, ...]
    work: Tensor
    whole: Block
    layout: Block

    @classmethod
    def of(cls, block: Block, directions: Mapping[str, Directions], work: Tensor) -> Home:
        """For a block."""
        rows: list[Rows] = []
        for (start, length, _), origin, slot in zip(
            block.runs.tolist(), block.origins.tolist(), block.slot_of_run.tolist(), strict=True
        ):
            lies = Slot(block.slots[slot].name, (length,), start)
            rows.append(directions[lies.name].within(origin, lies, rows[-1].stop if rows else 0))
        extra = rows[-1].stop if rows else 0
        coordinates = [Slot("coordinates", (extra,), len(work) - extra)] if extra else []
        whole = Block.cut([*coordinates, *(each.slot for each in rows)], WHOLE)
        return cls(
            rows=tuple(rows),
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
    def directed(self) -> tuple[Rows, ...]:
        """Those that have coordinates."""
        return tuple(each for each in self.rows if len(each.basis))

    @cached_property
    def coordinates(self) -> Tensor:
        """Those at work."""
        return self.work[len(self.work) - self.alone.numel :]

    def spread(self, bits: float) -> float:
        """Bits for each value or coordinate, of so many for each value."""
        extra = sum(each.stop for each in self.rows[-1:])
        return bits * (self.whole.numel - extra) / self.whole.numel if extra else bits

    def add(self, coordinates: Tensor) -> None:
        """Adds to the values at work what coordinates stand for."""
        for each in self.directed:
            each.add(coordinates, self.work, self.work)


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
    """

    home: Home
    payload: Tensor
    coordinates: Tensor
    left: Tensor
    scales: Tensor
    steps: Tensor
    points: tuple[int, int, int]
    room: int


@dataclass(frozen=True, eq=False)
class SubspaceDeadZone(DeadZone):
    """Coordinates of each matrix's rows in a few directions, and what is left: levels of nearly the same step.

    Directions are learnt from the averages, which all ranks have, and so take no bytes. Coordinates are rounded before
    the rest is, which takes in what they are off by: so no more is left than there was.

    Attributes:
        bits: For each value, with the coordinates' share.
        rank: Directions of each matrix that is larger than its factors of that rank.
        slots: The parameters that it belongs to, once it is installed.
        directions: Theirs, by name.
        work: Room for values and coordinates of any block.
        homes: What there is for each block.
    """

    rank: int = 4
    slots: tuple[Slot, ...] = ()
    directions: Mapping[str, Directions] = field(default_factory=dict)
    work: Tensor | None = None
    homes: dict[Block, Home] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.rank, int) and 1 <= self.rank <= MOST_RANK):
            raise ConfigurationError(
                f"rank={self.rank!r} is out of range; choose 1 to {MOST_RANK} directions, usually 4"
            )

    def installed(self, store: Store, slots: Sequence[Slot], numel: int) -> SubspaceDeadZone:
        """With directions of each parameter, and a buffer to work in."""
        directions = {slot.name: Directions.of(slot, self.rank, store) for slot in slots}
        room = numel + ALIGNMENT * len(slots) + sum(each.drawn.numel() for each in directions.values())
        work = torch.zeros(room, dtype=torch.float32, device=store.device)
        return replace(self, slots=tuple(slots), directions=directions, work=work, homes={})

    def payload_bytes(self, block: Block) -> int:
        """As many as without coordinates."""
        home = self._home(block)
        return deadzone_payload_bytes(home.layout, self._tile(home), home.spread(self.bits))

    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, payload: Tensor, key: int) -> None:
        """Splits rows, rounds coordinates by a step that suits both parts, and the rest by one that fits."""
        home, source = self._home(block), feedback.source(gradient)
        for each in home.rows:
            kernels.split_rows(each.block, source, each.basis, each.own(home.coordinates), home.work)
        rounded = self._round(home, payload)
        home.add(rounded.left)
        self._write(rounded, block, gradient, feedback)

    def encode_each(
        self, blocks: Sequence[Block], gradient: Tensor, feedback: Feedback, payloads: Tensor, key: int
    ) -> None:
        """The same, but that rows are split, and get what coordinates are off by, matrix by matrix."""
        homes = [self._home(block) for block in blocks]
        self._split(homes, feedback.source(gradient))
        rounded = []
        for block, home, payload in zip(blocks, homes, payloads, strict=True):
            for each in home.directed:
                each.own(home.coordinates).copy_(each.of(each.directions.mine))
            size = self.payload_bytes(block)
            payload[size:] = 0
            rounded.append(self._round(home, payload[:size]))
            for each in home.directed:
                each.of(each.directions.mine).copy_(each.own(rounded[-1].left))
        for directions in self.directions.values():
            if len(directions.basis):
                kernels.add_product(directions.block, directions.mine, directions.basis, homes[0].work, homes[0].work)
        for block, written in zip(blocks, rounded, strict=True):
            self._write(written, block, gradient, feedback)

    def _split(self, homes: Sequence[Home], source: kernels.Compensated) -> None:
        """Leaves the coordinates of all rows with their matrix; some that owners have only parts of have none."""
        work, rows = homes[0].work, [each for home in homes for each in home.rows]
        torn = {
            each.directions.block: each.directions
            for each in rows
            if each.basis.shape[0] < each.directions.basis.shape[0]
        }
        for each in self.directions.values():
            if each.block in torn:
                each.mine.zero_()
            else:
                kernels.split_rows(each.block, source, each.basis, each.mine, work)
        for part in rows if torn else ():
            if part.directions.block in torn:
                coordinates = torch.empty_like(part.of(part.directions.mine), memory_format=torch.contiguous_format)
                kernels.split_rows(part.block, source, part.basis, coordinates, work)
                part.of(part.directions.mine).copy_(coordinates)

    def _round(self, home: Home, payload: Tensor) -> Rounded:
        """Rounds the coordinates at work."""
        tile, coordinates = self._tile(home), home.coordinates.clone()
        scales = kernels.deadzone_scales(home.whole, kernels.Compensated(home.work))
        room = 8 * deadzone_room(home.layout, tile, payload)
        sample = kernels.deadzone_sample(home.whole, home.work, scales, room)
        step, points = kernels.deadzone_step(home.whole, sample, tile, room)
        left = coordinates.clone()
        if len(left):
            room = max(room - self._off(home, left, scales * step, points), 0)
        return Rounded(home, payload, coordinates, left, scales, scales * step, points, room)

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
        if not scales.isfinite().all():
            feedback.compensate(block, gradient)
            return
        if (unsent := home.coordinates - rounded.left).any():
            home.add(unsent)
        for kept, unsent in zip(block.parts(feedback.residual), block.parts(home.work), strict=True):
            kept.copy_(unsent)

    def decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """Sums what levels stand for, and learns from it, but from an owner's share."""
        self._sum(block, payloads, out, weight)
        if block.slots == self.slots:
            self._learn(out)

    def decode_each(self, blocks: Sequence[Block], payloads: Tensor, out: Tensor) -> None:
        """What all owners' payloads stand for, matrix by matrix once all are read, and learns from it."""
        for block, payload in zip(blocks, payloads, strict=True):
            work = self._read(block, payload[None, : self.payload_bytes(block)], 1.0).work
        for each in self.directions.values():
            kernels.add_product(each.block, each.read, each.basis, work, out)
        self._learn(out)

    def _sum(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        home = self._read(block, payloads, weight)
        for each in home.rows:
            each.add(home.coordinates, home.work, out)

    def _read(self, block: Block, payloads: Tensor, weight: float) -> Home:
        """Has the sums of values and of coordinates at work, and notes the latter."""
        self.check(block, payloads)
        home = self._home(block)
        kernels.deadzone_decode(home.layout, payloads, self._tile(home), home.work, weight)
        for each in home.directed:
            each.of(each.directions.read).copy_(each.own(home.coordinates))
        return home

    def _learn(self, average: Tensor) -> None:
        for each in self.directions.values():
            each.learn(average)

    def _off(self, home: Home, coordinates: Tensor, steps: Tensor, points: tuple[int, int, int]) -> int:
        """Leaves of coordinates what they are off by as they will be read; returns how many bits their codes take."""
        block, tile = home.alone, self._tile(home)
        size = deadzone_payload_bytes(block, tile, MOST_BITS)
        payload = torch.empty(size, dtype=torch.uint8, device=coordinates.device)
        kernels.deadzone_encode(block, coordinates, True, steps, points, tile, payload)
        edge = size - deadzone_room(block, tile, payload)
        return int(payload[4 + HEAD : edge].view(torch.int32).sum())

    def _steps(self, block: Block) -> int:
        """Coordinates have a step, too."""
        return self._home(block).layout.segment_count

    def _tile(self, home: Home) -> int:
        return deadzone_tile(home.spread(self.bits))

    def _home(self, block: Block) -> Home:
        if self.work is None:
            raise ConfigurationError("a subspace belongs to parameters; use what installed() returns")
        if block not in self.homes:
            self.homes[block] = Home.of(block, self.directions, self.work)
        return self.homes[block]
