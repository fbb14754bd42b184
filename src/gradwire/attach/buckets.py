"""A model's gradients in flat buffers that are averaged in place: what all loops of one's own share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

from torch import Tensor

from gradwire.attach.averaged import Averaged
from gradwire.engine import Unit
from gradwire.engine.engine import Engine
from gradwire.layout import Slot, flat_slots
from gradwire.wire.wire import TensorFuture, Wire

BUCKET_ELEMENTS = 25 * 2**20 // 4
"""DDP's bucket size, in float32 elements."""

Shapes = Sequence[tuple[str, tuple[int, ...]]]

Flat = TypeVar("Flat", Tensor, Any)

Work = Callable[[int], None]
"""What is done with a bucket of some number, on the wire's thread."""


def _nothing(index: int) -> None:
    """Where nothing is to be done."""


class Averaging(Protocol):
    """What averages them, as a handle does."""

    averaged: Averaged
    engine: Engine
    wire: Wire


class Buckets:
    """A handle's parameters in buckets of DDP's size, last ones first, as their gradients come.

    Args:
        handle: Whose parameters they are, and who averages them; in one bucket where it compresses a whole model.
        alignment: Each parameter starts at a multiple of as many elements. What lies between two of them takes no part
            in an average, and must be zero.

    Attributes:
        units: Each bucket's, in the order of their averages.
    """

    def __init__(self, handle: Averaging, alignment: int = 1) -> None:
        self._handle = handle
        shapes = list(handle.averaged.shapes.items())
        cut = [shapes] if handle.engine.configuration.whole else _in_buckets(shapes)
        self.units: list[Unit] = [handle.engine.unit(self._slots(each, alignment)) for each in cut]

    def _slots(self, shapes: Shapes, alignment: int) -> tuple[Slot, ...]:
        """Where they lie; shards of a parameter draw random numbers of their own."""
        parts = self._handle.averaged.parameters
        return tuple(replace(slot, part=parts[slot.name].get("part", "")) for slot in flat_slots(shapes, alignment))

    def views(self, index: int, buffer: Flat) -> dict[str, Flat]:
        """A bucket's parameters in its buffer, by name; also in one of JAX's."""
        return {slot.name: buffer[slot.offset : slot.stop].reshape(slot.shape) for slot in self.units[index].slots}

    def average(self, buffers: Sequence[Tensor], fill: Work = _nothing, hand_on: Work = _nothing) -> None:
        """Averages one step's gradients in place, and returns when all of them have been handed on.

        Args:
            buffers: ``float32[unit.numel]`` for each unit.
            fill: Writes a buffer before it is averaged.
            hand_on: Takes the averages from it.

        Raises:
            ConfigurationError: If a guard cannot go along as things are; nothing is changed.
            WireError: If a collective fails, because a worker ended, stopped or failed, or takes longer than the
                process group's timeout. An error of the method's own is raised as it is.
            GradwireError: If an earlier step failed.
        """
        self._handle.engine.before_step()
        with self._handle.wire.whole():
            for future in [self._submit(index, each, fill, hand_on) for index, each in enumerate(buffers)]:
                self._handle.wire.wait(future)

    def _submit(self, index: int, buffer: Tensor, fill: Work, hand_on: Work) -> TensorFuture:
        wire, unit = self._handle.wire, self.units[index]
        future = wire.promise()

        def done() -> None:
            hand_on(index)
            wire.keep(future, buffer)

        self._handle.engine.average(
            wire,
            lambda: unit,
            buffer,
            fill=partial(fill, index),
            hand_on=done,
            counted=buffer[: _elements(unit.slots)],
            last=index == len(self.units) - 1,
        )
        return future


def _elements(slots: Sequence[Slot]) -> int:
    """How many there are, without what lies between."""
    return sum(slot.numel for slot in slots)


def _in_buckets(shapes: Shapes) -> list[Shapes]:
    buckets: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    filled = 0
    for slot in reversed(flat_slots(shapes)):
        if filled >= BUCKET_ELEMENTS:
            buckets.append([])
            filled = 0
        buckets[-1].append((slot.name, slot.shape))
        filled += slot.numel
    return list(buckets)
