"""The way in for FSDP2: the average over the replicas of every shard, while backward goes on.

FSDP calls its hook with a parameter group's gradient, reduced over the shards. That buffer is averaged where it lies,
if it is float32, and FSDP makes the parameters' gradients views of it; so at the end of backward there is nothing left
to copy. What parameters had for gradients before is set aside until then: FSDP would add to it what is no average yet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.attach.given import check_left_out
from gradwire.attach.handle import Handle
from gradwire.attach.roll_call import RollCall
from gradwire.attach.shards import local, part_of
from gradwire.attach.torch_fsdp import ParameterGroup, ShardedModel, went_through_fsdp
from gradwire.attach.twice import hooked
from gradwire.engine.guarding import Guarding
from gradwire.engine.guards import Unused
from gradwire.engine.mixture import Configured
from gradwire.engine.unit import Unit
from gradwire.errors import GradwireError
from gradwire.layout import Slot
from gradwire.wire import Synchronization
from gradwire.wire.wire import TensorFuture


@dataclass(frozen=True, eq=False)
class _Part:
    """A parameter group in a flat buffer.

    Attributes:
        group: FSDP's.
        slots: Where in the reduced gradient each parameter lies.
        way: Who handles which of them; or, where the whole model is averaged at once, their place in its buffer.
    """

    group: ParameterGroup
    slots: tuple[Slot, ...]
    way: Unit | Tensor


@dataclass(frozen=True, eq=False)
class _Arrival:
    """A group's gradient that came in this backward pass.

    Attributes:
        part: Whose.
        aside: What each parameter had for a gradient before.
        average: ``float32``, laid out as the gradient, where its average will be; None in a pass that does not average.
    """

    part: _Part
    aside: list[Tensor | None]
    average: Tensor | None

    def hand_on(self) -> None:
        """Leaves each parameter what it had, and the average added to it."""
        for parameter, slot, aside in zip(self.part.group.parameters, self.part.slots, self.aside, strict=True):
            if self.average is None or parameter.grad is None:
                parameter.grad = aside
                continue
            gradient, average = local(parameter.grad), self.average[slot.offset : slot.stop].view(slot.shape)
            if (factor := self.part.group.factors[1]) != 1:
                average.mul_(factor)
            if gradient.data_ptr() != average.data_ptr() or gradient.dtype != average.dtype:
                gradient.copy_(average)
            if aside is not None:
                local(aside).add_(gradient)
                parameter.grad = aside


class _ShardedAverages:
    """Averages what backward brings, and ends the step when backward ends."""

    def __init__(self, handle: Handle, model: ShardedModel) -> None:
        self._handle = handle  # which lives as long as the model does
        self._model = model
        self._coming: list[_Arrival] = []
        self._ended: TensorFuture | None = None
        engine = handle.engine
        layouts = [_slots(group, model.names) for group in model.groups]
        self._whole: tuple[Unit, Tensor] | None = None
        self._unused = Unused(engine.give_back, ask=True)
        if handle.configuration.whole:
            starts = list(accumulate((_stop(slots) for slots in layouts), initial=0))
            moved = [
                replace(slot, offset=start + slot.offset)
                for start, slots in zip(starts, layouts, strict=False)
                for slot in slots
            ]
            buffer = torch.zeros(starts[-1], dtype=torch.float32, device=engine.store.device)
            self._whole = engine.unit(moved), buffer
            engine.guards.append(self._unused)
            rooms = [buffer[start:stop] for start, stop in pairwise(starts)]
            ways: list[Unit | Tensor] = [*rooms]
        else:
            ways = [engine.unit(slots) for slots in layouts]
        self._parts = [_Part(group, slots, way) for group, slots, way in zip(model.groups, layouts, ways, strict=True)]
        for part in self._parts:
            part.group.attach(partial(self._on_gradient, part))
        model.at_end_of_backward(self._end)

    def _on_gradient(self, part: _Part, gradient: Tensor) -> None:
        """Takes in what FSDP reduced over the shards; averaged in place until backward ends."""
        if part.group.averages and self._ended is None:
            self._begin()
        try:
            part.group.check_gradient(gradient)
            if any(part is each.part for each in self._coming):
                raise GradwireError(
                    "the gradient of one parameter group came twice before backward ended: an earlier backward pass "
                    "was broken off, or a part of the model is run again and again by reentrant checkpointing; choose "
                    "use_reentrant=False"
                )
            self._take_in(part, gradient)
        except BaseException as error:  # half a step has been handed to the wire
            self._handle.wire.fail(error, raised=True)
            raise

    def _begin(self) -> None:
        check_left_out(self._model.frozen)
        self._model.check_outermost()
        for part in self._parts:
            part.group.check_policy()
        self._handle.engine.before_step()
        self._ended = self._handle.wire.promise(otherwise=self._nothing())

    def _take_in(self, part: _Part, gradient: Tensor) -> None:
        group = part.group
        aside = [each.grad for each in group.parameters]
        for each in group.parameters:
            each.grad = None
        if group.partial is not None:
            gradient += group.partial
        group.partial = None if group.averages else gradient
        average = self._average(part, gradient) if group.averages else None
        self._coming.append(_Arrival(part, aside, average))

    def _average(self, part: _Part, reduced: Tensor) -> Tensor:
        """Queues a group's average, which comes in the buffer that is returned; padding counts, as FSDP sends it."""
        engine, wire, way = self._handle.engine, self._handle.wire, part.way
        gradient = reduced[: _stop(part.slots)]
        if isinstance(way, Tensor):

            def collect() -> list[Synchronization]:
                way.copy_(gradient)
                engine.count(reduced.nbytes, False)
                return []

            wire.submit(collect, lambda: None)
            return way
        staged = gradient if gradient.dtype == torch.float32 else torch.empty_like(gradient, dtype=torch.float32)

        def fill() -> None:
            if staged is not gradient:
                staged.copy_(gradient)

        engine.average(wire, lambda: way, staged, fill=fill, counted=reduced.nbytes)
        return staged

    def _end(self) -> None:
        """Ends the step, waits for its averages and hands them on."""
        ended, self._ended = self._ended, None
        coming, self._coming = self._coming, []
        if ended is not None:
            with self._handle.wire.whole():
                self._end_step(ended, [each.part for each in coming])
                self._handle.wire.wait(ended)
            coming += self._from_others()
        with torch.no_grad():
            for arrival in coming:
                arrival.hand_on()

    def _from_others(self) -> list[_Arrival]:
        """Groups that took part on other replicas only: of a model that is averaged at once all take the averages."""
        found = []
        for part in self._parts:
            if isinstance(part.way, Tensor) and self._unused.elsewhere.issuperset(slot.name for slot in part.slots):
                found.append(_Arrival(part, [each.grad for each in part.group.parameters], part.way))
                for each in part.group.parameters:
                    each.grad = torch.empty_like(each, requires_grad=False)
        return found

    def _end_step(self, ended: TensorFuture, came: list[_Part]) -> None:
        engine, wire, nothing = self._handle.engine, self._handle.wire, self._nothing()

        def end() -> None:
            wire.keep(ended, nothing)

        if self._whole is None:
            engine.end_step(wire, end)
            return
        unit, buffer = self._whole
        missing = [part for part in self._parts if part not in came]
        self._unused.names |= {slot.name for part in missing for slot in part.slots}

        def fill() -> None:
            for part in missing:
                if isinstance(part.way, Tensor):
                    part.way.zero_()

        engine.average(wire, lambda: unit, buffer, fill=fill, counted=0, last=True, end=end)

    def _nothing(self) -> Tensor:
        return torch.empty(0, device=self._handle.engine.store.device, dtype=torch.float32)


def _slots(group: ParameterGroup, names: dict[int, str]) -> tuple[Slot, ...]:
    return tuple(
        Slot(names[id(parameter)], shape, offset, part_of(parameter).get("part", ""))
        for parameter, (shape, offset) in zip(group.parameters, group.places, strict=True)
    )


def _stop(slots: tuple[Slot, ...]) -> int:
    return max(slot.stop for slot in slots)


def sharded_model(model: nn.Module) -> ShardedModel | None:
    """A model as FSDP2 has it, or None if that knows nothing of it."""
    return ShardedModel(model) if went_through_fsdp(model) else None


def compress_sharded(
    model: ShardedModel,
    replicas: dist.ProcessGroup,
    configuration: Configured,
    guarding: Guarding,
    roll_call: RollCall,
) -> Handle:
    """Averages a model's gradients over its replicas from now on.

    Raises:
        ConfigurationError: If it cannot be; the model stays as it was.
    """
    handle = Handle(configuration, model.parameters, replicas, roll_call, guarding)
    _ShardedAverages(handle, model)
    model.fail_as_the_wire_does()
    hooked(handle, model.parameters)
    return handle
