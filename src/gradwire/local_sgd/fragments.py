"""Which coordinates of a model are averaged together."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwire.attach.buckets import BUCKET_ELEMENTS
from gradwire.attach.given import Named
from gradwire.attach.shards import local
from gradwire.errors import ConfigurationError
from gradwire.layout import Granularity, Slot, flat_slots
from gradwire.local_sgd.finite import finite
from gradwire.local_sgd.schedule import Schedule

STRETCH_ELEMENTS = 1 << 20
"""Where segments do not depend on it, what is averaged at once: so little that hardly anything is sent before the first
of it is encoded or left to decode after the last of it has come, and enough for a collective."""


@dataclass(frozen=True, eq=False)
class Piece:
    """A parameter, or some of its coordinates.

    Attributes:
        name: The parameter's name, followed by the coordinates unless it is whole.
        parameter: The parameter.
        part: The coordinates, as elements of the parameter, or of this rank's part of a DTensor, laid out row by row;
            None for all of them.
        shape: The shape of that; ``(k,)`` for k coordinates of a vector and ``(k, 1)`` for k of anything else, so
            that a :class:`gradwire.DensePolicy` tells vectors from others.
    """

    name: str
    parameter: torch.nn.Parameter
    part: slice | None
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, name: str, parameter: torch.nn.Parameter) -> Piece:
        """All of a parameter."""
        return cls(name, parameter, None, tuple(local(parameter).shape))

    @classmethod
    def some(cls, name: str, parameter: torch.nn.Parameter, start: int, stop: int, step: int) -> Piece:
        """Elements ``start``, ``start + step``, … below ``stop``."""
        text = f"{start}:{stop}" if step == 1 else f"{start}::{step}"
        count = len(range(start, stop, step))
        shape = (count,) if parameter.dim() < 2 else (count, 1)
        return cls(f"{name}[{text}]", parameter, slice(start, stop, step), shape)

    @property
    def numel(self) -> int:
        """Number of coordinates."""
        return math.prod(self.shape)

    def read(self, tensor: Tensor) -> Tensor:
        """These coordinates of a tensor that is shaped as the parameter, in the piece's shape; perhaps a view."""
        values = local(tensor).detach()
        return values if self.part is None else values.reshape(-1)[self.part].reshape(self.shape)

    def write(self, tensor: Tensor, values: Tensor) -> None:
        """Replaces these coordinates of a tensor that is shaped as the parameter."""
        target = local(tensor).detach()
        if self.part is None:
            target.copy_(values.view(self.shape))
            return
        flat = target.reshape(-1)
        flat[self.part] = values.reshape(-1).to(flat.dtype)
        if not target.is_contiguous():
            target.copy_(flat.view(target.shape))


@dataclass(frozen=True, eq=False)
class Stretch:
    """Consecutive pieces of a fragment that are averaged at once.

    Attributes:
        anchor: ``float32[numel]``, a part of the fragment's.
        change: ``float32[numel]``, a part of the fragment's.
        slots: Where in them each piece lies.
        pieces: Each piece, with its views of the fragment's origin and of the change.
    """

    anchor: Tensor
    change: Tensor
    slots: tuple[Slot, ...]
    pieces: tuple[tuple[Piece, Tensor, Tensor], ...]

    def measure(self) -> None:
        """Fills in the change, from where the parameters' own precision let it start."""
        for piece, origin, change in self.pieces:
            torch.sub(origin.to(piece.parameter.dtype).float(), piece.read(piece.parameter).float(), out=change)

    def land(self) -> None:
        """Turns the average of changes, which has taken the change's place, into where it takes the anchor."""
        torch.sub(self.anchor, self.change, out=self.change)


class Fragment:
    """Pieces that are averaged at the same steps, with what all ranks knew of them last.

    Args:
        number: Which fragment it is.
        pieces: What it consists of.
        granularity: Of the method, which sees nothing beyond a stretch.
        eager: Whether local steps may begin elsewhere than at the anchor.

    Attributes:
        anchor: ``float32[numel]``, where the last average left the pieces: the same bits on all ranks.
        anchors: Views of it, one a piece; the same tensors for good, as an outer optimizer knows them.
        origin: ``float32[numel]``, where local steps began: the anchor, or if eager a buffer of its own, which each
            rank has otherwise.
        change: ``float32[numel]``, how far local steps went from there, downhill: origin minus parameter. Then the
            average of that, and without an outer optimizer at last the anchor that is to be.
        stretches: What of it is averaged at once: all of it where segments are models, as much as DDP has in a bucket
            where they are buckets.
        rounds: Averages that the method made and that all ranks take; none while the handle was paused.
        level: The local step after which all ranks last had the anchor for parameters, and the same beside them.
    """

    def __init__(self, number: int, pieces: Sequence[Piece], granularity: Granularity, eager: bool = False) -> None:
        self.number = number
        self.pieces = tuple(pieces)
        self._slots = slots = flat_slots([(piece.name, piece.shape) for piece in pieces])
        device = pieces[0].parameter.device
        self.anchor = torch.empty(slots[-1].stop, dtype=torch.float32, device=device)
        self.change = torch.zeros_like(self.anchor)
        self.anchors = [view for _, view in self.named(self.anchor)]
        self.origin = torch.empty_like(self.anchor) if eager else self.anchor
        self._origins = [view for _, view in self.named(self.origin)] if eager else self.anchors
        self._changes = [view for _, view in self.named(self.change)]
        self.stretches = list(self._stretches(granularity))
        self._pairs = [
            (self.anchor, self.change),
            *((stretch.anchor, stretch.change) for stretch in self.stretches),
            *zip(self.anchors, self._changes, strict=True),
        ]
        self.rounds = 0
        self.level = 0

    def named(self, buffer: Tensor) -> list[tuple[str, Tensor]]:
        """Views of ``anchor`` or ``change``, each with its piece's name."""
        return [(slot.name, buffer[slot.offset : slot.stop].view(slot.shape)) for slot in self._slots]

    def start(self) -> None:
        """Takes the parameters, which are the same on all ranks, for what the last average left."""
        for piece, anchor in zip(self.pieces, self.anchors, strict=True):
            anchor.copy_(piece.read(piece.parameter))
        self.origin.copy_(self.anchor)

    def move(self, outer: Optimizer | None) -> None:
        """Moves the anchor to where ``change`` says, or lets an outer optimizer step along it as a gradient."""
        if outer is None:
            for anchor, change in self._pairs:
                anchor.data, change.data = change.data, anchor.data
            return
        for anchor, change in zip(self.anchors, self._changes, strict=True):
            anchor.grad = change
        outer.step()
        for anchor in self.anchors:
            anchor.grad = None

    def look_ahead(self, outer: Optimizer | None, share: float) -> None:
        """Takes parameters to where this worker's share of the changes would take the anchor, which stays."""
        self.origin.copy_(self.anchor)
        if outer is None:
            self.origin.sub_(self.change, alpha=share)
        else:
            before = {each: copy.deepcopy(outer.state[each]) for each in self.anchors if each in outer.state}
            groups = [dict(group) for group in outer.param_groups]  # where some optimizers count their steps
            for group in outer.param_groups:
                group.update({key: copy.deepcopy(value) for key, value in group.items() if key != "params"})
            for anchor, change in zip(self.anchors, self._changes, strict=True):
                anchor.grad = change * share
            outer.step()
            for anchor, origin in zip(self.anchors, self._origins, strict=True):
                anchor.grad = None
                ahead = anchor.clone()
                anchor.copy_(origin)
                origin.copy_(ahead)
                outer.state.pop(anchor, None)
            outer.state.update(before)
            for group, values in zip(outer.param_groups, groups, strict=True):
                group.clear()
                group.update(values)
        for piece, origin in zip(self.pieces, self._origins, strict=True):
            piece.write(piece.parameter, origin)

    def hand_on(self, mix: float) -> None:
        """Takes parameters to the anchor, all the way or a share of it."""
        self.origin.copy_(self.anchor)
        for piece, anchor in zip(self.pieces, self.anchors, strict=True):
            values = anchor
            if mix < 1:
                values = torch.lerp(piece.read(piece.parameter).float(), anchor, mix)
            piece.write(piece.parameter, values)

    def moved(self) -> bool:
        """Whether this rank's parameters are elsewhere than at the anchor, as their own precision has it."""
        return any(
            not torch.equal(piece.read(piece.parameter).float(), anchor.to(piece.parameter.dtype).float())
            for piece, anchor in zip(self.pieces, self.anchors, strict=True)
        )

    def finite(self) -> bool:
        """Whether this rank's parameters are."""
        return all(finite(piece.read(piece.parameter)) for piece in self.pieces)

    def _stretches(self, granularity: Granularity) -> Iterator[Stretch]:
        least = {"model": self.change.numel(), "bucket": BUCKET_ELEMENTS}.get(granularity.scope, STRETCH_ELEMENTS)
        pieces = list(zip(self.pieces, self._origins, self._changes, strict=True))
        begin = 0
        for index, slot in enumerate(self._slots):
            start = self._slots[begin].offset
            if slot is self._slots[-1] or slot.stop - start >= least:
                own = flat_slots([(each.name, each.shape) for each in self._slots[begin : index + 1]])
                part = slice(start, slot.stop)
                yield Stretch(self.anchor[part], self.change[part], own, tuple(pieces[begin : index + 1]))
                begin = index + 1


def cut(parameters: Named, schedule: Schedule, granularity: Granularity) -> list[Fragment]:
    """Cuts a model into fragments of nearly equal size.

    Args:
        parameters: Names and parameters, in the model's order.
        schedule: Says how many, and how.
        granularity: Of the method.

    Raises:
        ConfigurationError: If there is too little for so many.
    """
    wanted = schedule.fragments
    filled = [(name, parameter) for name, parameter in parameters if _numel(parameter)]
    if wanted == 1:
        groups = [[Piece.whole(name, parameter) for name, parameter in filled]]
    elif schedule.cut == "layers":
        groups = _layers(filled, wanted)
    else:
        of_cut = _contiguous if schedule.cut == "contiguous" else _strided
        groups = of_cut(filled, wanted)
    if not all(groups):
        layers = schedule.cut == "layers"
        what = f"{len(filled)} parameters" if layers else f"{_count(filled):,} coordinates"
        raise ConfigurationError(
            f"fragments={wanted} is out of range; {what} cannot be cut into so many, choose fewer"
            f"{', or cut=' + repr('contiguous') if layers else ''}"
        )
    return [Fragment(number, pieces, granularity, schedule.eager) for number, pieces in enumerate(groups)]


def _count(parameters: Named) -> int:
    return sum(_numel(parameter) for _, parameter in parameters)


def _numel(parameter: torch.nn.Parameter) -> int:
    return local(parameter).numel()


def _layers(parameters: Named, wanted: int) -> list[list[Piece]]:
    """Consecutive whole parameters; each goes where its middle coordinate lies, but none stays empty if possible."""
    groups: list[list[Piece]] = [[] for _ in range(wanted)]
    total, before, number = _count(parameters), 0, 0
    for index, (name, parameter) in enumerate(parameters):
        middle = (2 * before + _numel(parameter)) * wanted // (2 * total)
        highest = min(number + 1, wanted - 1) if index else 0
        lowest = wanted - (len(parameters) - index)  # so that those that follow can fill what is left
        number = max(min(max(number, middle), highest), min(lowest, highest))
        groups[number].append(Piece.whole(name, parameter))
        before += _numel(parameter)
    return groups


def _contiguous(parameters: Named, wanted: int) -> list[list[Piece]]:
    total = _count(parameters)
    edges = [number * total // wanted for number in range(wanted + 1)]
    groups: list[list[Piece]] = [[] for _ in range(wanted)]
    before = 0
    for name, parameter in parameters:
        for group, (low, high) in zip(groups, pairwise(edges), strict=True):
            start, stop = max(low - before, 0), min(high - before, _numel(parameter))
            if start < stop:
                group.append(Piece.some(name, parameter, start, stop, 1))
        before += _numel(parameter)
    return groups


def _strided(parameters: Named, wanted: int) -> list[list[Piece]]:
    groups: list[list[Piece]] = [[] for _ in range(wanted)]
    before = 0
    for name, parameter in parameters:
        for number, group in enumerate(groups):
            start = (number - before) % wanted
            if start < _numel(parameter):
                group.append(Piece.some(name, parameter, start, _numel(parameter), wanted))
        before += _numel(parameter)
    return groups
