"""Levels of a dead-zone quantiser, of coordinates in directions that past averages had first, then of what is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.lowrank import as_rows, gains, orthonormal_rows, scaled_rows
from gradwire.codecs.quantize.deadzone import DeadZone
from gradwire.errors import ConfigurationError
from gradwire.kernels.reference import deadzone_payload_bytes, deadzone_room, deadzone_tile
from gradwire.kernels.reference.deadzone import HEAD
from gradwire.layout import Block, Granularity, Slot
from gradwire.memory import Feedback, Kind, Store
from gradwire.randomness import gaussian

MOST_BITS = 72.0
"""More than the codes of a value take."""

MOST_RANK = 64

WHOLE = Granularity("model")


@dataclass(frozen=True, eq=False)
class Subspace:
    """A few directions in the space of a matrix's rows, the same on every rank; or none.

    Attributes:
        block: The matrix, ``[n, m]``; in one row if there are none.
        basis: ``float32[r, m]``: orthonormal rows, all zero as long as nothing is known.
        drawn: ``float32[r, n]``: weights of rows that begin a direction.
        first: Of its coordinates among those of all matrices.
    """

    block: Block
    basis: Tensor
    drawn: Tensor
    first: int

    @classmethod
    def of(cls, slot: Slot, rank: int, store: Store, first: int) -> Subspace:
        """A parameter's; its basis is kept under its name."""
        rank = rank if gains(slot.shape, rank) else 0
        n, m = as_rows(slot.shape) if rank else (1, slot.numel)
        start, drawn = torch.zeros(rank, m, dtype=torch.float32), gaussian(slot.stream, rank * n).view(rank, n)
        (basis,) = store.stacked("basis", [slot.name], lambda _: start, Kind.SHARED) if rank else [start]
        return cls(Block.cut([slot], WHOLE), basis.to(store.device), drawn.to(store.device), first)

    @property
    def stop(self) -> int:
        """One past its last coordinate."""
        return self.first + self.drawn.numel()

    def own(self, coordinates: Tensor) -> Tensor:
        """Its own of all matrices' coordinates, ``float32[r, n]``."""
        return coordinates[self.first : self.stop].view(self.drawn.shape)

    def add(self, coordinates: Tensor, values: Tensor, out: Tensor) -> None:
        """``out`` is ``values`` and what coordinates stand for."""
        kernels.add_product(self.block, self.own(coordinates), self.basis, values, out)

    def learn(self, average: Tensor, coordinates: Tensor) -> None:
        """One step of subspace iteration on an average, by its coordinates as all ranks have read them.

        A direction of which there was nothing is begun anew, as a random combination of rows (Halko et al. 2011,
        arXiv:0909.4061).
        """
        if not len(self.basis):
            return
        read = self.own(coordinates)
        weights = torch.where((read != 0).any(1, keepdim=True), read, self.drawn)
        found = torch.empty_like(self.basis)
        kernels.combine_rows(self.block, scaled_rows(weights), average, found)
        (basis,) = orthonormal_rows(found[None])
        self.basis.copy_(torch.where(basis.isfinite().all(), basis, self.basis))


@dataclass(frozen=True, eq=False)
class Home:
    """What the codec has in one buffer.

    Attributes:
        subspaces: Of all parameters.
        work: Values as in the buffer, then all coordinates.
        whole: The coordinates and then the values of ``work``, as one segment.
        layout: The same as two segments, or one if there are no coordinates.
        values: The values of ``work``.
        alone: The coordinates by themselves.
    """

    subspaces: tuple[Subspace, ...]
    work: Tensor
    whole: Block
    layout: Block
    values: Block
    alone: Block

    @classmethod
    def of(cls, slots: Sequence[Slot], rank: int, store: Store, numel: int) -> Home:
        """For the parameters in a buffer of ``numel`` elements."""
        subspaces: list[Subspace] = []
        for slot in slots:
            subspaces.append(Subspace.of(slot, rank, store, subspaces[-1].stop if subspaces else 0))
        extra = subspaces[-1].stop if subspaces else 0
        coordinates = Slot("coordinates", (extra,), numel)
        values = Block.cut(slots, WHOLE)
        whole = Block.cut([coordinates, *slots], WHOLE) if extra else values
        return cls(
            subspaces=tuple(subspaces),
            work=torch.zeros(coordinates.stop, dtype=torch.float32, device=store.device),
            whole=whole,
            layout=replace(whole, segments=np.array([0, 1, len(whole.runs)])) if extra else whole,
            values=values,
            alone=Block.dense(coordinates.name, np.array([extra])),
        )

    @property
    def coordinates(self) -> Tensor:
        """Those at work."""
        return self.work[len(self.work) - self.alone.numel :]

    def add(self, coordinates: Tensor) -> None:
        """Adds to the values at work what coordinates stand for."""
        for each in self.subspaces:
            if len(each.basis):
                each.add(coordinates, self.work, self.work)


@dataclass(frozen=True, eq=False)
class SubspaceDeadZone(DeadZone):
    """Coordinates of each matrix's rows in a few directions, and what is left: levels of nearly the same step.

    Directions are learnt from the averages, which all ranks have, and so take no bytes. Coordinates are rounded before
    the rest is, which takes in what they are off by: so no more is left than there was.

    Attributes:
        bits: For each value, with the coordinates' share.
        rank: Directions of each matrix that is larger than its factors of that rank.
        home: Its place, once it is installed.
    """

    rank: int = 4
    home: Home | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.rank, int) and 1 <= self.rank <= MOST_RANK):
            raise ConfigurationError(
                f"rank={self.rank!r} is out of range; choose 1 to {MOST_RANK} directions, usually 4"
            )

    def installed(self, store: Store, slots: Sequence[Slot], numel: int) -> SubspaceDeadZone:
        """With the subspaces, and a buffer to work in."""
        return replace(self, home=Home.of(slots, self.rank, store, numel))

    @property
    def tile(self) -> int:
        """Elements whose codes are read independently of all others."""
        return deadzone_tile(self._share)

    def payload_bytes(self, block: Block) -> int:
        """As many as without coordinates."""
        return deadzone_payload_bytes(self._at_home.layout, self.tile, self._share)

    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, payload: Tensor, key: int) -> None:
        """Splits rows, rounds coordinates by a step that suits both parts, and the rest by one that fits."""
        home, tile, source = self._at_home, self.tile, feedback.source(gradient)
        work, coordinates = home.work, home.coordinates
        for each in home.subspaces:
            kernels.split_rows(each.block, source, each.basis, each.own(coordinates), work)
        scales = kernels.deadzone_scales(home.whole, kernels.Compensated(work))
        room = 8 * deadzone_room(home.layout, tile, payload)
        sample = kernels.deadzone_sample(home.whole, work, scales, room)
        step, points = kernels.deadzone_step(home.whole, sample, tile, room)
        steps = scales * step
        left = coordinates.clone()
        if len(left):
            room -= self._rounded(left, steps, points)
            home.add(left)
            room = max(room, 0)
            sample = kernels.deadzone_sample(home.values, work, scales, room)
            finest, _ = kernels.deadzone_step(home.values, sample, tile, room)
            steps = torch.cat((steps, scales * finest))
        kernels.deadzone_encode(home.layout, work, True, steps, points, tile, payload)
        if feedback.residual is None:
            return
        if not scales.isfinite().all():
            feedback.compensate(block, gradient)
            return
        if (unsent := coordinates - left).any():
            home.add(unsent)
        for kept, unsent in zip(block.parts(feedback.residual), block.parts(work), strict=True):
            kept.copy_(unsent)

    def decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """Sums what levels stand for, and learns from it."""
        self.check(block, payloads)
        home = self._at_home
        kernels.deadzone_decode(home.layout, payloads, self.tile, home.work, weight)
        for each in home.subspaces:
            each.add(home.coordinates, home.work, out)
            each.learn(out, home.coordinates)

    def _rounded(self, coordinates: Tensor, steps: Tensor, points: tuple[int, int, int]) -> int:
        """Leaves of coordinates what they are off by as they will be read; returns how many bits their codes take."""
        block = self._at_home.alone
        size = deadzone_payload_bytes(block, self.tile, MOST_BITS)
        payload = torch.empty(size, dtype=torch.uint8, device=coordinates.device)
        kernels.deadzone_encode(block, coordinates, True, steps, points, self.tile, payload)
        edge = size - deadzone_room(block, self.tile, payload)
        return int(payload[4 + HEAD : edge].view(torch.int32).sum())

    @property
    def _at_home(self) -> Home:
        if self.home is None:
            raise ConfigurationError("a subspace belongs to parameters; use what installed() returns")
        return self.home

    @property
    def _share(self) -> float:
        """Bits for each value or coordinate."""
        home = self._at_home
        return self.bits * (home.layout.numel - home.alone.numel) / home.layout.numel
