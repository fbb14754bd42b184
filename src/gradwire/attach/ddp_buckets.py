"""DDP's buckets, averaged as they come or collected first."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from gradwire.attach.given import Named
from gradwire.attach.handle import Handle
from gradwire.attach.memory_order import by_rows, by_strides, gradients, permuted
from gradwire.engine.unit import Unit
from gradwire.layout import flat_slots
from gradwire.surroundings import as_on_the_wire
from gradwire.wire import Synchronization
from gradwire.wire.wire import TensorFuture


class Buckets:
    """Averages each bucket as it comes.

    DDP forms its final buckets only after a backward pass. A run that goes on from a saved state therefore averages in
    the buckets that the state tells of until DDP's own are final, so that it gives the same bits.
    """

    def __init__(self, handle: Handle, parameters: Named) -> None:
        self._handle = handle
        self._parameters = parameters
        self._names = {id(parameter): name for name, parameter in parameters}
        self._units: dict[int, tuple[tuple[int, ...], Unit]] = {}
        self._known = handle.buckets
        self._coming: list[tuple[str, ...]] = []
        self._first: tuple[str, ...] = ()
        self._resumed: Collected | None = None

    def on_bucket(self, bucket: GradBucket, last: bool) -> TensorFuture:
        """Queues a bucket, perhaps a step's last; its future holds the averaged buffer."""
        names = tuple(self._names[id(parameter)] for parameter in bucket.parameters())
        if not self._coming:
            self._begin(names)
        index = len(self._coming)
        self._coming.append(names)
        resumed = self._resumed
        if last:
            came, self._coming = tuple(self._coming), []
            if resumed is None:
                self._handle.buckets = came
            elif came == self._handle.buckets:
                self._resumed = None
            self._known = self._handle.buckets
        return self._average(bucket, index, last) if resumed is None else resumed.on_bucket(bucket, last)

    def _begin(self, names: tuple[str, ...]) -> None:
        """Before a step: has a state been loaded, or has DDP formed its buckets anew?"""
        if self._handle.buckets is not self._known:
            self._first, self._units = names, {}
            buckets = self._handle.buckets
            self._resumed = Collected(self._handle, self._parameters, buckets) if buckets else None
        elif names != self._first:
            self._resumed = None

    def _average(self, bucket: GradBucket, index: int, last: bool) -> TensorFuture:
        wire, engine = self._handle.wire, self._handle.engine
        buffer, parameters = bucket.buffer(), bucket.parameters()
        future = wire.promise(otherwise=buffer)
        with wire.on_stream():
            staged = buffer if buffer.dtype == torch.float32 else torch.empty_like(buffer, dtype=torch.float32)
        turned = permuted(staged, parameters)

        def fill() -> None:
            if staged is not buffer:
                staged.copy_(buffer)
            by_rows(turned, engine.store)

        def hand_on() -> None:
            by_strides(turned, engine.store)
            wire.keep(future, buffer if staged is buffer else buffer.copy_(staged))

        unit = partial(self._unit, index, parameters)
        engine.average(wire, unit, staged, fill=fill, hand_on=hand_on, counted=buffer, last=last)
        return future

    def _unit(self, index: int, parameters: list[Tensor]) -> Unit:
        """How a bucket is handled; made anew when DDP has rebuilt its buckets."""
        identity = tuple(id(parameter) for parameter in parameters)
        known = self._units.get(index)
        if known is None or known[0] != identity:
            if not index:  # DDP's first step has one bucket, and later ones need no room for a whole model
                self._handle.engine.store.renew_scratch()
            slots = flat_slots([(self._names[id(each)], tuple(each.shape)) for each in parameters])
            known = (identity, self._handle.engine.unit(slots))
            self._units[index] = known
        return known[1]


class Collected:
    """Collects all buckets of a step, then averages them in other ones."""

    @as_on_the_wire()
    def __init__(
        self,
        handle: Handle,
        parameters: Named,
        buckets: Sequence[Sequence[str]],
    ) -> None:
        self._handle = handle
        self._names = {id(parameter): name for name, parameter in parameters}
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters}
        self._units: list[tuple[Unit, Tensor]] = []
        self._places: dict[str, Tensor] = {}
        for names in buckets:
            slots = flat_slots([(name, shapes[name]) for name in names])
            unit = handle.engine.unit(slots)
            flat = torch.zeros(unit.numel, dtype=torch.float32, device=parameters[0][1].device)
            self._units.append((unit, flat))
            self._places.update({slot.name: flat[slot.offset : slot.stop].view(slot.shape) for slot in slots})
        self._waiting: list[tuple[TensorFuture, Tensor, list[tuple[Tensor, Tensor]]]] = []

    def on_bucket(self, bucket: GradBucket, last: bool) -> TensorFuture:
        """Takes in a bucket; the last one of a step sets all of them going."""
        wire, engine = self._handle.wire, self._handle.engine
        buffer, parameters = bucket.buffer(), bucket.parameters()
        places = [self._places[self._names[id(parameter)]] for parameter in parameters]
        moves = list(zip(places, gradients(buffer, parameters), strict=True))
        future = wire.promise(otherwise=buffer)

        def begin() -> list[Synchronization]:
            self._waiting.append((future, buffer, moves))
            for place, values in moves:
                place.copy_(values)
            if not last:
                engine.count(buffer, last)
            return []

        wire.submit(begin, lambda: None)
        if last:
            for unit, flat in self._units:
                self._submit(unit, flat, buffer if flat is self._units[-1][1] else None)
        return future

    def _submit(self, unit: Unit, flat: Tensor, last: Tensor | None) -> None:
        """Queues a unit; ``last`` is the step's last bucket, with its last unit."""
        wire, engine = self._handle.wire, self._handle.engine

        def end() -> None:
            waiting, self._waiting = self._waiting, []
            for future, buffer, moves in waiting:
                for place, values in moves:
                    values.copy_(place)
                wire.keep(future, buffer)

        engine.average(wire, lambda: unit, flat, counted=last, last=last is not None, end=end)
