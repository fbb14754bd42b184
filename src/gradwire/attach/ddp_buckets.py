"""DDP's buckets, averaged as they come or collected first."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.utils.dlpack import from_dlpack

from gradwire.attach.given import Named
from gradwire.attach.handle import Handle
from gradwire.attach.memory_order import by_rows, by_strides, gradients, permuted
from gradwire.engine.unit import Unit
from gradwire.layout import Slot, flat_slots
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
        engine.average(wire, unit, staged, fill=fill, hand_on=hand_on, counted=buffer.nbytes, last=last)
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
    """Collects all buckets of a step, then averages them in other ones.

    Once DDP's are final, parameters lie in the order in which they come: a bucket is copied in at once, and its average
    is handed on where it lies. Where gradients are views of DDP's buckets it is copied back at once as well, as DDP
    would copy parameter by parameter.
    """

    @as_on_the_wire()
    def __init__(
        self,
        handle: Handle,
        parameters: Named,
        buckets: Sequence[Sequence[str]],
        views: bool = False,
    ) -> None:
        self._handle = handle
        self._views = views
        self._names = {id(parameter): name for name, parameter in parameters}
        self._shapes = {name: tuple(parameter.shape) for name, parameter in parameters}
        self._buckets = buckets
        numels = [sum(math.prod(self._shapes[name]) for name in names) for names in buckets]
        self._flats = [torch.zeros(numel, dtype=torch.float32, device=parameters[0][1].device) for numel in numels]
        self._order = [name for names in buckets for name in names]
        self._came: list[str] = []
        self._settled = False
        self._coming: list[str] = []
        self._waiting: list[tuple[TensorFuture, Tensor, list[tuple[Tensor, Tensor]]]] = []
        self._lay_out()

    def _lay_out(self) -> None:
        """Has the parameters of each unit lie in the order in which they come; what handles them keeps its own."""
        place = {name: index for index, name in enumerate(self._order)}
        self._units: list[Unit] = []
        self._slots: dict[str, tuple[Tensor, Slot]] = {}
        self._wholes: dict[tuple[str, ...], Tensor | None] = {}
        for names, flat in zip(self._buckets, self._flats, strict=True):
            laid = flat_slots([(name, self._shapes[name]) for name in sorted(names, key=place.__getitem__)])
            slots = {slot.name: slot for slot in laid}
            self._units.append(self._handle.engine.unit([slots[name] for name in names]))
            self._slots |= {slot.name: (flat, slot) for slot in laid}

    def on_bucket(self, bucket: GradBucket, last: bool) -> TensorFuture:
        """Takes in a bucket; the last one of a step sets all of them going."""
        wire, engine = self._handle.wire, self._handle.engine
        buffer, parameters = bucket.buffer(), bucket.parameters()
        names = tuple(self._names[id(parameter)] for parameter in parameters)
        self._follow(names, last)
        whole = None if permuted(buffer, parameters) else self._whole(names)
        if whole is None:
            moves = list(zip(map(self._place, names), gradients(buffer, parameters), strict=True))
        else:
            moves = [(whole, buffer)]
        future = wire.promise(otherwise=buffer)

        def begin() -> list[Synchronization]:
            for place, values in moves:
                place.copy_(values)
            if whole is not None and buffer.dtype == torch.float32 and not self._views:
                self._waiting.append((future, whole, []))
            else:
                self._waiting.append((future, buffer, moves))
            if not last:
                engine.count(buffer.nbytes, last)
            return []

        wire.submit(begin, lambda: None)
        if last:
            for unit, flat in zip(self._units, self._flats, strict=True):
                self._submit(unit, flat, buffer.nbytes if flat is self._flats[-1] else None)
        return future

    def _follow(self, names: tuple[str, ...], last: bool) -> None:
        """Before a step, everything is laid out as it came in the last two."""
        if not self._coming and self._settled and self._came != self._order:
            self._order = self._came
            self._handle.wire.call(self._lay_out)
        self._coming += names
        if last:
            self._settled = self._coming == self._came
            self._came, self._coming = self._coming, []

    def _place(self, name: str) -> Tensor:
        flat, slot = self._slots[name]
        return flat[slot.offset : slot.stop].view(slot.shape)

    def _whole(self, names: tuple[str, ...]) -> Tensor | None:
        """Where parameters lie one after another, if they do; DDP takes what it is handed from its memory's start."""
        if names not in self._wholes:
            flats, slots = zip(*map(self._slots.__getitem__, names), strict=True)
            together = all(flat is flats[0] for flat in flats)
            joined = together and all(slot.stop == after.offset for slot, after in pairwise(slots))
            self._wholes[names] = from_dlpack(flats[0][slots[0].offset : slots[-1].stop]) if joined else None
        return self._wholes[names]

    def _submit(self, unit: Unit, flat: Tensor, last: int | None) -> None:
        """Queues a unit; ``last`` is how many bytes the step's last bucket has, with its last unit."""
        wire, engine = self._handle.wire, self._handle.engine

        def end() -> None:
            waiting, self._waiting = self._waiting, []
            for future, average, moves in waiting:
                for place, values in moves:
                    values.copy_(place)
                wire.keep(future, average)

        engine.average(wire, lambda: unit, flat, counted=last, last=last is not None, end=end)
