"""Levels of a dead-zone quantiser, of coordinates in directions that past averages had first, then of what is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.lowrank import as_rows, gains, orthonormal_rows, scaled_rows
from gradwire.codecs.quantize.deadzone import DeadZone
from gradwire.errors import ConfigurationError
from gradwire.kernels.reference import deadzone_payload_bytes, deadzone_room, deadzone_tile
from gradwire.layout import Block, Granularity, Slot
from gradwire.memory import Feedback, Kind, Store
from gradwire.randomness import gaussian

MOST_BITS = 72.0
"""More than the codes of a value take."""

WHOLE = Granularity("model")


@dataclass(frozen=True, eq=False)
class Subspace:
    """A few directions in the space of a matrix's rows, the same on every rank.

    Attributes:
        block: The matrix, ``[n, m]``.
        basis: ``float32[r, m]``: orthonormal rows, all zero as long as nothing is known.
        drawn: ``float32[r, n]``: weights of rows that begin a direction.
        first: Of its coordinates among those of all matrices.
    """

    block: Block
    basis: Tensor
    drawn: Tensor
    first: int

    def of(self, coordinates: Tensor) -> Tensor:
        """Its own of all matrices' coordinates, ``float32[r, n]``."""
        return coordinates[self.first : self.first + self.drawn.numel()].view(self.drawn.shape)

    def add(self, coordinates: Tensor, values: Tensor, out: Tensor) -> None:
        """``out`` is ``values`` and what coordinates stand for."""
        kernels.add_product(self.block, self.of(coordinates), self.basis, values, out)

    def learn(self, average: Tensor, coordinates: Tensor) -> None:
        """One step of subspace iteration on an average, by its coordinates as all ranks have read them.

        A direction of which there was nothing is begun anew, as a random combination of rows (Halko et al. 2011,
        arXiv:0909.4061).
        """
        read = self.of(coordinates)
        weights = torch.where((read != 0).any(1, keepdim=True), read, self.drawn)
        found = torch.empty_like(self.basis)
        kernels.combine_rows(self.block, scaled_rows(weights), average, found)
        basis = orthonormal_rows(found[None])[0]
        self.basis.copy_(torch.where(basis.isfinite().all(), basis, self.basis))


@dataclass(frozen=True, eq=False)
class _Home:
    """What the codec has in one buffer, whose last elements are the coordinates.

    Attributes:
        layout: All coordinates, then all values: one segment.
        alone: The coordinates in a buffer of their own.
        subspaces: Of the matrices that have one.
        others: What has none, if there is anything.
        work: A buffer laid out alike.
    """

    layout: Block
    alone: Block
    subspaces: tuple[Subspace, ...]
    others: Block | None
    work: Tensor

    def coordinates(self, buffer: Tensor) -> Tensor:
        """Where they lie in a buffer."""
        return buffer[len(self.work) - self.alone.numel :]


@dataclass(frozen=True, eq=False)
class SubspaceDeadZone(DeadZone):
    """Coordinates of each matrix's rows in a few directions, and what is left: levels of one step for all of them.

    Directions are learnt from the averages, which all ranks have, and so take no bytes. Coordinates are rounded before
    the rest is, which takes in what they are off by: so no more is left than there was.

    Attributes:
        bits: For each value, with the coordinates' share.
        rank: Directions of each matrix that is larger than its factors of that rank.
    """

    rank: int = 4
    home: _Home | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.rank, int) and 1 <= self.rank <= 64):
            raise ConfigurationError(f"rank={self.rank!r} is out of range; choose 1 to 64 directions, usually 4")

    def extra(self, slots: Sequence[Slot]) -> int:
        """Elements of all coordinates."""
        return sum(self.rank * as_rows(slot.shape)[0] for slot in slots if gains(slot.shape, self.rank))

    def installed(self, store: Store, slots: Sequence[Slot], numel: int) -> SubspaceDeadZone:
        """With subspaces, in a buffer that has room for coordinates after all else."""
        subspaces: list[Subspace] = []
        others, extra, first = [], self.extra(slots), 0
        for slot in slots:
            if not gains(slot.shape, self.rank):
                others.append(slot)
                continue
            n, m = as_rows(slot.shape)
            start = torch.zeros(self.rank, m, dtype=torch.float32)
            (basis,) = store.stacked("basis", [slot.name], lambda _, start=start: start, Kind.SHARED)
            drawn = gaussian(slot.stream, self.rank * n).view(self.rank, n).to(store.device)
            subspaces.append(Subspace(Block.cut([slot], WHOLE), basis, drawn, first))
            first += drawn.numel()
        coordinates = [Slot("coordinates", (extra,), numel - extra)] if extra else []
        home = _Home(
            layout=Block.cut([*coordinates, *slots], WHOLE),
            alone=Block.cut([replace(each, offset=0) for each in coordinates], WHOLE),
            subspaces=tuple(subspaces),
            others=Block.cut(others, WHOLE) if others else None,
            work=torch.zeros(numel, dtype=torch.float32, device=store.device),
        )
        return replace(self, home=home)

    def payload_bytes(self, block: Block) -> int:
        """As many as without coordinates."""
        return deadzone_payload_bytes(self._home.layout, self.tile, self._share)

    @property
    def tile(self) -> int:
        """Elements whose codes are read independently of all others."""
        return deadzone_tile(self._share)

    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, payload: Tensor, key: int) -> None:
        """Splits matrices, chooses the step by both parts, rounds coordinates, and writes all."""
        home, tile, source = self._home, self.tile, feedback.source(gradient)
        if source.residual is None:
            home.work[: len(gradient)] = gradient
            source = kernels.Compensated(home.work, home.work, beta=0.0)
        values = feedback.buffer(home.work)
        for each in home.subspaces:
            kernels.split_rows(each.block, source, each.basis, each.of(home.coordinates(values)))
        finite = home.others is None or kernels.accumulate(
            home.others, source.gradient, values, source.beta, source.gamma
        )
        scales = kernels.deadzone_scales(home.layout, kernels.Compensated(values))
        scales = torch.where(torch.as_tensor(finite), scales, torch.nan)
        room = 8 * deadzone_room(home.layout, tile, payload)
        step, points = kernels.deadzone_step(home.layout, values, scales, tile, room)
        levels = (scales * step, points, tile)

        coordinates = home.coordinates(values).nan_to_num_()
        left = coordinates.clone()
        if home.subspaces:
            spare = torch.empty(deadzone_payload_bytes(home.alone, tile, MOST_BITS), dtype=torch.uint8)
            kernels.deadzone_encode(home.alone, left, True, *levels, spare.to(values.device))
        for each in home.subspaces:
            each.add(left, values, values)
        kernels.deadzone_encode(home.layout, values, True, *levels, payload)
        if (unsent := coordinates - left).any():
            for each in home.subspaces:
                each.add(unsent, values, values)

    def decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """Sums what levels stand for, and learns from it."""
        self.check(block, payloads)
        home = self._home
        kernels.deadzone_decode(home.layout, payloads, self.tile, home.work, weight)
        for each in home.subspaces:
            each.add(home.coordinates(home.work), home.work, out)
            each.learn(out, home.coordinates(home.work))
        if home.others is not None:
            for read, written in zip(home.others.parts(home.work), home.others.parts(out), strict=True):
                written.copy_(read)

    @property
    def _home(self) -> _Home:
        if self.home is None:
            raise ConfigurationError("a subspace needs its place; use the codec as installed()")
        return self.home

    @property
    def _share(self) -> float:
        """Bits for each value or coordinate."""
        numel, extra = self._home.layout.numel, self._home.alone.numel
        return self.bits * (numel - extra) / numel
