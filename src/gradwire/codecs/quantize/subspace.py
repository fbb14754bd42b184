"""Levels of a dead-zone quantiser, of coordinates in directions that past averages had first, then of what is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from gradwire import deferred, kernels
from gradwire.codecs.quantize.deadzone import FEWEST, DeadZone, Sampled, steps_of
from gradwire.codecs.quantize.directions import WHOLE, Directions, Rows, Subspaces, Together
from gradwire.deferred import Count, placed
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
        work: Values as in the block's buffer, and behind them all coordinates.
        first: Where in ``work`` the coordinates are.
        whole: The coordinates and then the values of ``work``, as one segment.
        layouts: What is written, by the elements of a tile.
        moves: A memory, where its values are, and where those at work are that belong there.
    """

    rows: tuple[Rows, ...]
    subspaces: Subspaces
    work: Tensor
    first: int
    whole: Block
    layouts: dict[int, Block] = field(default_factory=dict)
    moves: list[tuple[Tensor, list[Tensor], list[Tensor]]] = field(default_factory=list)

    @classmethod
    def of(cls, block: Block, subspaces: Subspaces, work: Tensor, first: int) -> Home:
        """For a block."""
        rows: list[Rows] = []
        for (start, length, _), origin, slot in zip(
            block.runs.tolist(), block.origins.tolist(), block.slot_of_run.tolist(), strict=True
        ):
            lies = Slot(block.slots[slot].name, (length,), start)
            rows.append(subspaces.directions[lies.name].within(origin, lies, rows[-1].stop if rows else 0))
        extra = rows[-1].stop if rows else 0
        coordinates = [Slot("coordinates", (extra,), first)] if extra else []
        whole = Block.cut([*coordinates, *(each.slot for each in rows)], WHOLE)
        return cls(rows=tuple(rows), subspaces=subspaces, work=work, first=first, whole=whole)

    def layout(self, tile: int) -> Block:
        """The coordinates, with zeros up to a whole tile, and the values, a segment each.

        So what values take is known by themselves, and the last ones have the room that was found for them.
        """
        if tile not in self.layouts:
            filled = -(-self.alone.numel // tile) * tile
            coordinates = [Slot("coordinates", (filled,), self.first)] if filled else []
            made = Block.cut([*coordinates, *(each.slot for each in self.rows)], WHOLE)
            self.layouts[tile] = replace(made, segments=np.array([0, 1, len(made.runs)])) if filled else made
        return self.layouts[tile]

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
        return self.work[self.first : self.first + self.alone.numel]

    def behind(self, tile: int) -> Tensor:
        """What follows the coordinates up to a whole tile."""
        end = self.first + self.alone.numel
        return self.work[end : end + -self.alone.numel % tile]

    def spread(self, bits: float) -> float:
        """Bits for each value or coordinate, of so many for each value."""
        return bits * self.values.numel / self.whole.numel if self.alone.numel else bits

    @cached_property
    def indices(self) -> Tensor:
        """``int64``: where each of the coordinates is among those of all matrices."""
        numbers = torch.arange(len(self.subspaces.read), device="cpu")
        parts = [each.in_matrix.own(numbers).flatten() for each in self.directed.rows]
        return placed(torch.cat(parts).numpy() if parts else np.empty(0, np.int64), self.work.device)

    def leave(self, block: Block, residual: Tensor) -> None:
        """Has in a memory the values at work."""
        if not self.moves or self.moves[0][0] is not residual:  # to find hundreds of stretches takes a millisecond
            self.moves[:] = [(residual, block.parts(residual), block.parts(self.work))]
        _, kept, values = self.moves[0]
        if kept:
            torch._foreach_copy_(kept, values)

    def take(self, of_all: Tensor) -> None:
        """Has at work those of some coordinates of all matrices."""
        torch.index_select(of_all, 0, self.indices, out=self.coordinates)

    def give(self, coordinates: Tensor, of_all: Tensor) -> None:
        """Has among coordinates of all matrices these."""
        of_all.index_copy_(0, self.indices, coordinates)


@dataclass(frozen=True, eq=False)
class Measured:
    """A block whose rows are split.

    Attributes:
        home: What there is for it.
        payload: Where it is written.
        coordinates: Its own.
        scales: Of all values and coordinates, as one segment.
        room: Bits.
        turn: What samples are taken by.
        sample: Of all, by which the step is chosen that suits both.
    """

    home: Home
    payload: Tensor
    coordinates: Tensor
    scales: Tensor
    room: int
    turn: int
    sample: Tensor


@dataclass(frozen=True, eq=False)
class Rounded:
    """The same once coordinates are rounded, while the rest is not.

    Attributes:
        of: What was measured.
        left: What coordinates are off by, as they will be read.
        step: Of the coordinates, relative to the scales.
        steps: The same, as it will be read.
        points: Of levels.
        room: Bits for the rest.
        finite: Whether all values are.
    """

    of: Measured
    left: Tensor
    step: float
    steps: Tensor
    points: tuple[int, int, int]
    room: int
    finite: bool


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
        work: Room for values, coordinates and a tile of any block.
        first: Where in ``work`` the coordinates are.
        homes: What there is for each block.
        for_owners: How matrices are split for blocks of several owners.
    """

    rank: int = 4
    slots: tuple[Slot, ...] = ()
    subspaces: Subspaces | None = None
    work: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float32))
    first: int = 0
    homes: dict[Block, Home] = field(default_factory=dict)
    for_owners: dict[tuple[Block, ...], tuple[Together, bool]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.rank, int) and 1 <= self.rank <= MOST_RANK):
            raise ConfigurationError(
                f"rank={self.rank!r} is out of range; choose 1 to {MOST_RANK} directions, usually 4"
            )

    def installed(self, store: Store, slots: Sequence[Slot], numel: int) -> SubspaceDeadZone:
        """With directions of each parameter, and a buffer to work in, which all buckets share.

        A tile is larger the fewer bits there are; with the coordinates, which are fewer than the values, each of both
        has at least half of those for a value.
        """
        subspaces, first = Subspaces.of(slots, self.rank, store), numel + ALIGNMENT * len(slots)
        fewest = (self.bits if self.budget is None else FEWEST) / 2
        work = store.scratch(first + subspaces.drawn.numel() + deadzone_tile(fewest), "split rows")
        slots = tuple(slots)
        return replace(self, slots=slots, subspaces=subspaces, work=work, first=first, homes={}, for_owners={})

    @property
    def directions(self) -> Mapping[str, Directions]:
        """Of each parameter, by name."""
        return self._subspaces.directions

    def payload_bytes(self, block: Block) -> int:
        """As many as without coordinates, but for their step; a tile that zeros fill up is within them."""
        home = self._home(block)
        step = 4 if home.alone.numel else 0
        return step + deadzone_payload_bytes(home.whole, self._tile(home), home.spread(self.bits))

    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, payload: Tensor, key: int) -> None:
        """Splits rows, rounds coordinates by a step that suits both parts, and the rest by one that fits."""
        home = self._home(block)
        home.together.split(feedback.source(gradient), home.coordinates, home.work)
        (rounded,) = self._round([self._measure(home, payload, key)])
        home.directed.add(rounded.left, home.work, home.work)
        self._write([rounded], [block], gradient, feedback)

    def encode_each(
        self, blocks: Sequence[Block], gradient: Tensor, feedback: Feedback, payloads: Tensor, key: int
    ) -> None:
        """The same, but that rows are split, and get what coordinates are off by, matrix by matrix."""
        subspaces, measured = self._subspaces, []
        mine, work = subspaces.mine, self.work
        together, torn = self._split_for(blocks)
        if torn:
            mine.zero_()
        together.split(feedback.source(gradient), mine, work)
        for block, payload in zip(blocks, payloads, strict=True):
            home, size = self._home(block), self.payload_bytes(block)
            home.take(mine)
            payload[size:] = 0
            measured.append(self._measure(home, payload[:size], key))
        rounded = self._round(measured)
        for each in rounded:
            each.of.home.give(each.left, mine)
        subspaces.directed.add(mine, work, work)
        self._write(rounded, blocks, gradient, feedback)

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

    def _measure(self, home: Home, payload: Tensor, turn: int) -> Measured:
        """Takes the sample by which coordinates at work are to be rounded."""
        scales = kernels.deadzone_scales(home.whole, kernels.Compensated(home.work))
        room = 8 * deadzone_room(home.layout(self._tile(home)), self._tile(home), payload)
        sample = kernels.deadzone_sample(home.whole, home.work, scales, room, turn)
        return Measured(home, payload, home.coordinates.clone(), scales, room, turn, sample)

    def _round(self, measured: Sequence[Measured]) -> list[Rounded]:
        """Rounds coordinates; by a step near the finest if that of the rest, which fits, is still to be found."""
        scales = [deferred.sent_to_host(each.scales) for each in measured]
        found = steps_of([self._sampled(each) for each in measured])
        lefts = [each.coordinates.clone() for each in measured]
        steps = [each.scales * step for each, (step, _) in zip(measured, found, strict=True)]
        taken = [
            self._off(each.home, left, own, points)
            for each, left, own, (_, points) in zip(measured, lefts, steps, found, strict=True)
        ]
        rounded = zip(measured, lefts, found, steps, torch.stack(taken).tolist(), scales, strict=True)  # waits once
        return [
            Rounded(each, left, step, own, points, max(each.room - bits, 0), bool(scale().isfinite().all()))
            for each, left, (step, points), own, bits, scale in rounded
        ]

    def _write(self, rounded: Sequence[Rounded], blocks: Sequence[Block], gradient: Tensor, feedback: Feedback) -> None:
        """Writes blocks to whose rest has been added what coordinates are off by."""
        finest = iter(steps_of([self._sampled_rest(each) for each in rounded if len(each.left)]))
        for block, each in zip(blocks, rounded, strict=True):
            of, home, steps = each.of, each.of.home, each.steps
            tile = self._tile(home)
            if len(each.left):
                home.coordinates.copy_(of.coordinates)
                home.behind(tile).zero_()
                steps = torch.cat((steps, of.scales * next(finest)[0]))
            kernels.deadzone_encode(home.layout(tile), home.work, True, steps, each.points, tile, of.payload)
            if feedback.residual is None:
                continue
            if not each.finite:
                feedback.compensate(block, gradient)
                continue
            if len(each.left):
                home.directed.add_some(home.coordinates - each.left, home.work)
            home.leave(block, feedback.residual)

    def _sampled(self, of: Measured) -> Sampled:
        """What the step of coordinates is chosen by."""
        exactly = not len(of.coordinates)
        return Sampled(of.home.whole, of.sample, self._tile(of.home), of.room, turn=of.turn, exactly=exactly)

    def _sampled_rest(self, rounded: Rounded) -> Sampled:
        """What the step of all but coordinates is chosen by."""
        home, room, turn = rounded.of.home, rounded.room, rounded.of.turn
        sample = kernels.deadzone_sample(home.values, home.work, rounded.of.scales, room, turn)
        return Sampled(home.values, sample, self._tile(home), room, turn=turn, near=rounded.step)

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
        tile = self._tile(home)
        kernels.deadzone_decode(home.layout(tile), payloads, tile, home.work, weight)
        home.give(home.coordinates, self._subspaces.read)
        return home

    def _learn(self, average: Tensor) -> None:
        self._subspaces.learn(average)

    def _off(self, home: Home, coordinates: Tensor, steps: Tensor, points: tuple[int, int, int]) -> Count:
        """Leaves of coordinates what they are off by as they will be read; returns how many bits their codes take."""
        if not len(coordinates):
            return torch.zeros((), dtype=torch.int64, device=coordinates.device)
        block, tile = home.alone, self._tile(home)
        size = deadzone_payload_bytes(block, tile, MOST_BITS)
        payload = torch.empty(size, dtype=torch.uint8, device=coordinates.device)
        kernels.deadzone_encode(block, coordinates, True, steps, points, tile, payload)
        edge = size - deadzone_room(block, tile, payload)
        return payload[4 + HEAD : edge].view(torch.int32).sum()

    def _steps(self, block: Block) -> int:
        """Coordinates have a step, too."""
        home = self._home(block)
        return home.layout(self._tile(home)).segment_count

    def _tile(self, home: Home) -> int:
        return deadzone_tile(home.spread(self.bits))

    def _home(self, block: Block) -> Home:
        if block not in self.homes:
            self.homes[block] = Home.of(block, self._subspaces, self.work, self.first)
        return self.homes[block]

    @property
    def _subspaces(self) -> Subspaces:
        if self.subspaces is None:
            raise ConfigurationError("a subspace belongs to parameters; use what installed() returns")
        return self.subspaces
