"""A model's gradients in flat buffers that are averaged in place: what all loops of one's own share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from torch import Tensor

from gradwire.attach.averaged import Averaged
from gradwire.attach.given import Named, default_group
from gradwire.attach.handle import Handle
from gradwire.attach.roll_call import RollCall
from gradwire.engine import Methods, Unit
from gradwire.engine.choices import Choices
from gradwire.engine.engine import Engine
from gradwire.engine.guarding import Guarding
from gradwire.engine.mixture import configure
from gradwire.layout import Slot, flat_slots
from gradwire.wire.wire import TensorFuture, Wire

BUCKET_ELEMENTS = 25 * 2**20 // 4
"""DDP's bucket size, in float32 elements."""

Shapes = Sequence[tuple[str, tuple[int, ...]]]

Flat = TypeVar("Flat", Tensor, Any)

Views = Sequence[Mapping[str, Tensor]]
"""Each bucket's parameters where they lie in its buffer, by name."""


def _leave(name: str, average: Tensor) -> None:
    """The average stays where it is."""


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

    def views(self, buffers: Sequence[Flat]) -> list[dict[str, Flat]]:
        """Each bucket's parameters in its buffer, by name; also in those of JAX."""
        return [
            {slot.name: buffer[slot.offset : slot.stop].reshape(slot.shape) for slot in unit.slots}
            for unit, buffer in zip(self.units, buffers, strict=True)
        ]

    def average(
        self,
        buffers: Sequence[Tensor],
        views: Views,
        given: Mapping[str, Tensor],
        take: Callable[[str, Tensor], object] = _leave,
    ) -> None:
        """Averages one step's gradients in place, and returns when all of them have been taken.

        Args:
            buffers: ``float32[unit.numel]`` for each unit, to be overwritten.
            views: Of them.
            given: Gradients by name, of as many elements as their parameters; a missing one counts as zero.
            take: Called with each parameter's name and average, on the wire's thread.

        Raises:
            ConfigurationError: If a guard cannot go along as things are; nothing is changed.
            WireError: If a collective fails, because a worker ended, stopped or failed, or takes longer than the
                process group's timeout. An error of the method's own is raised as it is.
            GradwireError: If an earlier step failed.
        """
        self._handle.engine.before_step()
        with self._handle.wire.whole():
            parts = zip(self.units, buffers, views, strict=True)
            for future in [self._submit(*each, given, take) for each in parts]:
                self._handle.wire.wait(future)

    def _submit(
        self,
        unit: Unit,
        buffer: Tensor,
        views: Mapping[str, Tensor],
        given: Mapping[str, Tensor],
        take: Callable[[str, Tensor], object],
    ) -> TensorFuture:
        wire = self._handle.wire
        future = wire.promise()

        def fill() -> None:
            for name, view in views.items():
                view.copy_(given[name].reshape(view.shape)) if name in given else view.zero_()

        def hand_on() -> None:
            for name, view in views.items():
                take(name, view)
            wire.keep(future, buffer)

        self._handle.engine.average(
            wire,
            lambda: unit,
            buffer,
            fill=fill,
            hand_on=hand_on,
            counted=sum(slot.numel * self._handle.averaged.itemsizes[slot.name] for slot in unit.slots),
            last=unit is self.units[-1],
        )
        return future


class Bucketed(Handle):
    """Averages gradients in buckets: a handle made from names and shapes.

    Args:
        named: Gives parameters by name, or what stands for them, in the model's order. What it raises is raised on all
            ranks.
        method: As in :func:`gradwire.compress`.
        process_group: As in :class:`gradwire.Synchronizer`.
        choices: What goes with every method.
        options: The method's hyper-parameters.
        alignment: As in :class:`Buckets`.

    Raises:
        ConfigurationError: If anything cannot be as asked, or differs between ranks.
    """

    def __init__(
        self,
        named: Callable[[], Named],
        method: Methods,
        process_group: Any,
        choices: Choices,
        options: dict[str, Any],
        alignment: int = 1,
    ) -> None:
        workers = default_group(process_group)
        with RollCall(workers) as roll_call:
            configuration = configure(method, options, choices, roll_call.workers)
            guarding = Guarding(choices)
            super().__init__(configuration, named(), workers, roll_call, guarding)
        self._buckets = Buckets(self, alignment)


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
