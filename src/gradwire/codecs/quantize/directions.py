"""A few directions in the space of each matrix's rows, learnt from averages, and rows as coordinates in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.lowrank import Factors, apart, as_rows, gains, orthonormal, remember, scaled
from gradwire.kernels import Places
from gradwire.kernels.places import joined
from gradwire.layout import Block, Granularity, Slot
from gradwire.memory import Kind, Store
from gradwire.randomness import gaussian

WHOLE = Granularity("model")

LINE = 16
"""Values of a cache line."""


@dataclass(frozen=True, eq=False)
class Directions:
    """A few directions in the space of a matrix's rows, the same on every rank; or none.

    Attributes:
        slot: The matrix.
        n: Its rows.
        basis: ``float32[r, m]``: orthonormal rows, all zero as long as nothing is known.
        first: Of the coordinates of its rows among those of all matrices, ``[r, n]``.
        begin: Of the basis among those of all matrices.
    """

    slot: Slot
    n: int
    basis: Tensor
    first: int
    begin: int

    @cached_property
    def block(self) -> Block:
        """The matrix alone."""
        return Block.cut([self.slot], WHOLE)

    @cached_property
    def rows(self) -> Rows:
        """All of them, with their coordinates among those of all matrices."""
        return Rows(self, self.slot, self.basis, 0, self.n, self.first, self.n)

    def within(self, origin: int, slot: Slot, first: int) -> Rows:
        """Some of its rows; what an owner has of a matrix of fewer rows than owners is a row without directions.

        Args:
            origin: Of the first element in the matrix.
            slot: Where they lie.
            first: Of their coordinates among those of all rows with which they are.
        """
        rank, m = self.basis.shape
        if not rank or origin % m or slot.numel % m:
            return Rows(self, slot, self.basis[:0].reshape(0, slot.numel), 0, 1, first, 1)
        count = slot.numel // m
        return Rows(self, slot, self.basis, origin // m, count, first, count)


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a matrix that a block has.

    Attributes:
        directions: The matrix's.
        slot: Where they lie.
        basis: The directions' that they have.
        origin: The first of them.
        count: How many.
        first: Of their coordinates among those of others.
        apart: How far from one another their coordinates in two directions are there.
    """

    directions: Directions
    slot: Slot
    basis: Tensor
    origin: int
    count: int
    first: int
    apart: int

    @cached_property
    def block(self) -> Block:
        """They alone."""
        return self.directions.block if self.slot is self.directions.slot else Block.cut([self.slot], WHOLE)

    @property
    def stop(self) -> int:
        """One past the last coordinate, where no others are between them."""
        return self.first + self.basis.shape[0] * self.count

    @cached_property
    def in_matrix(self) -> Rows:
        """The same, with their coordinates among those of all matrices."""
        return replace(self, first=self.directions.first + self.origin, apart=self.directions.n)

    @property
    def place(self) -> tuple[int, ...]:
        """As :class:`Places` has it."""
        rank, m = self.basis.shape
        return self.slot.offset, self.count, m, rank, self.first, self.apart, self.directions.begin

    def own(self, coordinates: Tensor) -> Tensor:
        """Theirs among others' coordinates, ``float32[r, count]``."""
        if not (rank := self.basis.shape[0]):
            return coordinates[:0].view(0, self.count)
        stop = self.first + (rank - 1) * self.apart + self.count
        return coordinates[self.first : stop].unfold(0, self.count, self.apart)


@dataclass(frozen=True, eq=False)
class Together:
    """Rows of several matrices, all at once where a device can.

    Attributes:
        rows: They.
        bases: The directions of all matrices, one after another.
    """

    rows: tuple[Rows, ...]
    bases: Tensor

    @cached_property
    def places(self) -> Places:
        """Where they lie, and what belongs to them."""
        return Places.of(each.place for each in self.rows)

    def split(self, source: kernels.Compensated, coordinates: Tensor, out: Tensor) -> None:
        """Leaves in ``coordinates`` those of all rows, and in ``out`` what they do not stand for."""
        if at_once := kernels.at_once("split_rows_each", out.device):
            at_once(self.places, source, self.bases, coordinates, out)
            return
        for each in self.rows:
            own = each.own(coordinates)
            found = own if own.is_contiguous() else torch.empty_like(own, memory_format=torch.contiguous_format)
            kernels.split_rows(each.block, source, each.basis, found, out)
            if found is not own:
                own.copy_(found)

    def add(self, coordinates: Tensor, values: Tensor, out: Tensor) -> None:
        """``out`` is ``values`` and what coordinates stand for."""
        if at_once := kernels.at_once("add_products", out.device):
            at_once(self.places, coordinates, self.bases, values, out)
            return
        for each in self.rows:
            kernels.add_product(each.block, each.own(coordinates).contiguous(), each.basis, values, out)

    def add_some(self, coordinates: Tensor, out: Tensor) -> None:
        """Adds to ``out`` what coordinates stand for, unless all are 0: then nothing changes, the sign of 0 neither."""
        some = coordinates.any()
        if at_once := kernels.at_once("add_products", out.device):
            at_once(self.places, coordinates, self.bases, out, out, some)
        elif some:
            self.add(coordinates, out, out)


@dataclass(frozen=True, eq=False)
class Subspaces:
    """The directions of all matrices.

    Attributes:
        directions: By name, in the order of their slots.
        groups: Shapes of coordinates and of bases of all matrices of one shape, ``(k, r, n)`` and ``(k, r, m)``, in the
            order in which they lie.
        bases: Of all matrices.
        drawn: Weights of rows that begin a direction, for each of the coordinates.
        read: Coordinates of an average's rows as all ranks have read them.
        mine: Of this worker's rows, while they are written for several owners.
    """

    directions: Mapping[str, Directions]
    groups: Sequence[tuple[tuple[int, int, int], tuple[int, int, int]]]
    bases: Tensor
    drawn: Tensor
    read: Tensor
    mine: Tensor

    @classmethod
    def of(cls, slots: Sequence[Slot], most: int, store: Store) -> Subspaces:
        """Those of parameters; a basis is kept under its parameter's name.

        Those of one shape lie together, and first all that leave the next ones at the begin of a cache line.
        """
        shapes = {slot: (rank, *as_rows(slot.shape)) for slot in slots if (rank := most * gains(slot.shape, most))}
        ranks = sorted(set(shapes.values()), key=lambda shape: shape[0] * shape[2] % LINE != 0)
        by_shape = {shape: [slot for slot in shapes if shapes[slot] == shape] for shape in dict.fromkeys(ranks)}
        order = [slot for some in by_shape.values() for slot in some]
        firsts = [0, *accumulate(shapes[slot][0] * shapes[slot][1] for slot in order)]
        begins = [0, *accumulate(shapes[slot][0] * shapes[slot][2] for slot in order)]
        kept = [Slot(each.name, shapes[each][::2], begin) for each, begin in zip(order, begins, strict=False)]
        bases = store.flat("basis", kept, begins[-1], Kind.SHARED, fits=True)
        drawn = [gaussian(each.stream, shapes[each][0] * shapes[each][1]) for each in order]
        found = dict(zip(order, zip(kept, firsts, strict=False), strict=True))
        directions = {}
        for slot in slots:
            if slot in found:
                lies, first = found[slot]
                basis = bases[lies.offset : lies.stop].view(lies.shape)
                directions[slot.name] = Directions(slot, shapes[slot][1], basis, first, lies.offset)
            else:
                directions[slot.name] = Directions(slot, 1, bases[:0].view(0, slot.numel), 0, 0)
        weights = torch.cat([*drawn, torch.empty(0, dtype=torch.float32)]).to(store.device)
        groups = [((len(some), rank, n), (len(some), rank, m)) for (rank, n, m), some in by_shape.items()]
        return cls(directions, groups, bases, weights, torch.zeros_like(weights), torch.zeros_like(weights))

    @cached_property
    def whole(self) -> Together:
        """All rows of all matrices."""
        return Together(tuple(each.rows for each in self.directions.values()), self.bases)

    @cached_property
    def directed(self) -> Together:
        """All rows of those that have directions."""
        return Together(tuple(each for each in self.whole.rows if len(each.basis)), self.bases)

    def learn(self, average: Tensor) -> None:
        """One step of subspace iteration on an average, by its coordinates as all ranks have read them.

        A direction of which there was nothing is begun anew, as a random combination of rows (Halko et al. 2011,
        arXiv:0909.4061).
        """
        if not self.groups:
            return
        coordinates, bases = zip(*self.groups, strict=True)
        weights = joined(scaled(self._weights(coordinates)))
        found = torch.empty_like(self.bases)
        if at_once := kernels.at_once("combine_rows_each", average.device):
            at_once(self.directed.places, weights, average, found)
        else:
            for each in self.directed.rows:
                begin, basis = each.directions.begin, each.basis
                combined = found[begin : begin + basis.numel()].view(basis.shape)
                kernels.combine_rows(each.block, each.own(weights), average, combined)
        remember(apart(self.bases, bases), orthonormal(apart(found, bases)))

    def _weights(self, shapes: Sequence[tuple[int, int, int]]) -> Factors:
        if at_once := kernels.at_once("weights_each", self.read.device):
            return apart(at_once(self.directed.places, self.read, self.drawn), shapes)
        both = zip(apart(self.read, shapes), apart(self.drawn, shapes), strict=True)
        return [torch.where((read != 0).any(2, keepdim=True), read, drawn) for read, drawn in both]
