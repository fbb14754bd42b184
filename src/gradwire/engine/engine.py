"""From flat gradient buffers to synchronizations, whatever brought the buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gradwire.codecs.codec import Codec
from gradwire.codecs.quantize import parse
from gradwire.deferred import Later
from gradwire.engine.automatic import Automatic
from gradwire.engine.change import carry_over, give_back, lasting, left_over, take_owed
from gradwire.engine.configuration import Configuration
from gradwire.engine.guards import Guard
from gradwire.engine.mixture import Configured, Settled
from gradwire.engine.nodes import Nodes
from gradwire.engine.unit import Share, Unit
from gradwire.errors import ConfigurationError
from gradwire.layout import Block, Slot, aligned, flat_slots
from gradwire.memory import OWED, Kind, Memory, NoMemory, Store
from gradwire.methods import Context, Dense, Method
from gradwire.routes import Shares
from gradwire.surroundings import as_on_the_wire
from gradwire.wire import Meter, Synchronization, Wire
from gradwire.wire.meter import all_reduce_bytes, marks_of

DENSE = Dense()


def _nothing() -> None:
    """Where nothing is to be done."""


class Engine:
    """Methods, memories and counters of one attachment.

    Args:
        configuration: All choices.
        rank: This worker.
        world_size: Number of workers.
        device: Where the gradients live.
        nodes: The nodes that workers average in first; None if they do not.

    Attributes:
        configuration: As given, or changed since.
        now: What of it holds in the step that comes next.
        guards: What goes along with every gradient, the outermost first.
        later: What the host is told of a step in the next.
        step: Averages made so far.
        under_way: Whether some of a step's gradients have been taken in and others not yet.
        observed: Whether squares of samples or micro-batches are told to methods that ask for them.
    """

    def __init__(
        self,
        configuration: Configured,
        rank: int,
        world_size: int,
        device: torch.device,
        nodes: Nodes | None = None,
    ) -> None:
        self.configuration = configuration
        self.now = configuration.at(0)
        self.guards: list[Guard] = []
        self.store = Store(device)
        self.meter = Meter(mark=marks_of(device))
        self.later = Later()
        self.step = 0
        self.under_way = False
        self.observed = False
        self.rank = rank
        self.world_size = world_size
        self.nodes = nodes
        self._paused_at: int | None = None
        self._missed = 0
        self._taken: dict[str, Tensor] = {}
        self._left: dict[str, Tensor] = {}
        self._came: dict[str, Tensor] = {}
        self._shares: WeakKeyDictionary[Unit, tuple[Share, ...]] = WeakKeyDictionary()
        self._uncompressed: WeakKeyDictionary[Unit, tuple[Share, ...]] = WeakKeyDictionary()

    @property
    def paused(self) -> bool:
        """Whether the method takes no part until :meth:`resume`."""
        return self._paused_at is not None

    @property
    def averages_densely(self) -> bool:
        """Whether the step that comes next, or is under way, is averaged densely as a whole."""
        return self.paused or self.step < self.configuration.start

    @property
    def dense_steps(self) -> int:
        """How many of the steps so far were: the method, whose randomness and schedules count steps, knows of none."""
        start = self.configuration.start
        since = self.step if self._paused_at is None else max(start, self._paused_at)
        return min(self.step, start) + self._missed + max(0, self.step - since)

    def pause(self) -> None:
        """From the next step on averages are dense, and what the method remembers stays as it is."""
        if self._paused_at is None:
            self._paused_at = self.step

    def resume(self) -> None:
        """The method goes on where it was."""
        self.go_on(self.step, self.dense_steps, paused=False)

    def go_on(self, step: int, dense_steps: int, *, paused: bool) -> None:
        """Counts from ``step`` on, of which ``dense_steps`` were averaged densely."""
        self.step = step
        self._missed = dense_steps - min(step, self.configuration.start)
        self._paused_at = step if paused else None
        self._go_by(self.configuration.at(step - dense_steps))

    def begin(self, step: int) -> None:
        """Takes up a step that others count."""
        self.step = step
        self._go_by(self.configuration.at(step - self.dense_steps))

    def change(self, configuration: Settled, slots: Sequence[Slot] = ()) -> None:
        """Averages by other choices from the next step on; of what is remembered goes on what can.

        Args:
            configuration: All choices, of which ``start`` is what it was.
            slots: Parameters that something is remembered of and that have been in no unit yet.
        """
        self.configuration = configuration
        self._go_by(configuration.at(self.step - self.dense_steps), slots)

    def _go_by(self, following: Settled, further: Sequence[Slot] = ()) -> None:
        former, self.now = self.now, following
        if former.rules == following.rules:
            return
        self.later.settle()
        self._carry_over(further, former, following)

    def _carry_over(self, further: Sequence[Slot], former: Settled, following: Settled | None) -> None:
        laid_out = {slot.name: slot for unit in self._shares for slot in unit.slots}
        slots = {slot.name: slot for slot in further} | laid_out
        carry_over(self.store, slots.values(), former, following, self.rank, self.world_size, self.nodes)
        self._make_anew()
        if self.step:  # a state that is saved before the next step has all that those begin with, too
            self._made([slot for slot in further if slot.name not in laid_out])

    def _make_anew(self) -> None:
        for unit in [*self._shares]:  # in the order in which they were laid out, so that the last layout is the last
            self._shares[unit] = self._made(unit.slots)

    def adopt(self, configuration: Configured, slots: Sequence[Slot] = ()) -> None:
        """Goes by other choices from the next step on, as if attached then; that step takes along what is owed.

        Args:
            configuration: All choices.
            slots: Parameters that something is remembered of and that have been in no unit yet.
        """
        self.later.settle()
        former, self.configuration, self.now = self.now, configuration, configuration.at(0)
        self._carry_over(slots, former, None)
        self.go_on(self.step, self.step, paused=self.paused)

    def saved(self, slots: Iterable[Slot]) -> dict[str, Any]:
        """Its part of a handle's state; of a method that is only tried, what lasts of these parameters, and no more.

        So it is for who begins to choose anew, as whoever loads it does.
        """
        kept = self.store
        if isinstance(self.configuration, Automatic) and not self.configuration.settled:
            kept = Store(self.store.device)
            for each in lasting(self.store, slots, self.now, self.rank, self.world_size, self.nodes):
                kept.put(*each)
        counts = {"step": self.step, "dense_steps": self.dense_steps, "paused": self.paused}
        return {**counts, "kinds": kept.kinds(), "tensors": kept.state()}

    @as_on_the_wire()
    def unit(self, slots: Sequence[Slot]) -> Unit:
        """Decides who handles the parameters of a buffer, and moves their memories to its layout."""
        unit = Unit(tuple(slots), max((slot.stop for slot in slots), default=0))
        self._shares[unit] = self._made(slots)
        return unit

    def shares(self, unit: Unit) -> tuple[Share, ...]:
        """Who handles what of a buffer: of each rule the compressing method's share and the dense one's, if any."""
        return self._shares[unit]

    def _made(self, slots: Sequence[Slot]) -> tuple[Share, ...]:
        shares = []
        for rule in self.now.rules:
            own = [slot for slot in slots if slot.numel and self.now.rule(slot.name) is rule]
            taken = [slot for slot in own if rule.compresses(slot.shape)]
            left = [slot for slot in own if not rule.compresses(slot.shape)]
            shares += self._compressed(rule, rule.method, taken, rule.route, rule.memory, rule.owner)
            if left:
                alone = flat_slots([(slot.name, slot.shape) for slot in left])
                share = self._share(
                    rule, DENSE, alone, alone[-1].stop, DENSE.routes[0], rule.memory.uncompressed(), None
                )
                shares.append(replace(share, aside=Block.cut(left, rule.granularity)))
        return tuple(shares)

    def _compressed(
        self,
        rule: Configuration,
        method: Method,
        slots: Sequence[Slot],
        route: str,
        memory: Memory,
        owner: Codec | None,
    ) -> list[Share]:
        """What compresses some parameters: those that the workers of a node share, and the others."""
        nodes, shares = self.nodes, []
        shared = [] if nodes is None else [slot for slot in slots if nodes.share(method, slot.shape)]
        alone = [slot for slot in slots if slot not in shared]
        if shared and nodes is not None:
            codec = parse(nodes.codec) if nodes.codec else None
            within = Shares.cut(shared, nodes.rows, nodes.place(self.rank), nodes.workers, nodes.dtype, codec)
            own = within.own
            share = self._share(rule, method, own, aligned(own[-1].stop), route, memory, owner, nodes)
            shares.append(replace(share, within=within))
        if alone:  # in the stretch of the buffer from the first to the last of them
            start, stop = min(slot.offset for slot in alone), max(slot.stop for slot in alone)
            moved = [replace(slot, offset=slot.offset - start) for slot in alone]
            share = self._share(rule, method, moved, stop - start, route, memory, owner)
            shares.append(replace(share, offset=start))
        return shares

    def _share(
        self,
        rule: Configuration,
        method: Method,
        slots: Sequence[Slot],
        numel: int,
        route: str,
        memory: Memory,
        owner: Codec | None,
        nodes: Nodes | None = None,
    ) -> Share:
        """What a method does with some parameters: over all workers, or over those of one place in all nodes."""
        block = Block.cut(slots, rule.granularity)
        rank, workers, seed = self.rank, self.world_size, rule.seed
        if nodes is not None:  # each place has a seed of its own: the same element numbers are others there
            rank, workers, seed = nodes.node(rank), nodes.count, seed + (nodes.place(rank) << 32)
        memory = memory.fitted(method.worker_bound(int(block.segment_numels.max())), workers)
        context = Context(block, numel, self.store, memory, route, owner, rank, workers, seed, rule.granularity)
        return Share(method, context, method.init(context))

    def _dense(self, unit: Unit) -> tuple[Share, ...]:
        """The average of a whole buffer as ``"dense"`` makes it; kept for as long as the unit is in use."""
        shares = self._uncompressed.get(unit)
        if shares is None:
            slots, rule = [slot for slot in unit.slots if slot.numel], self.configuration.rules[0]
            shares = tuple(self._compressed(rule, DENSE, slots, DENSE.routes[0], NoMemory(), None))
            self._uncompressed[unit] = shares
        return shares

    def before_step(self) -> None:
        """To be called before a step's first gradient is handed to the wire.

        Raises:
            ConfigurationError: If a guard cannot go along as things are, or a CUDA graph is being captured; nothing is
                changed.
        """
        if self.store.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ConfigurationError(
                "gradients are to be averaged while a CUDA graph is captured, which cannot hold what the wire's thread "
                "does; capture forward and backward under model.no_sync(), or train without graphs"
            )
        for guard in self.guards:
            guard.before_step()

    def average(
        self,
        wire: Wire,
        unit: Callable[[], Unit],
        gradient: Tensor,
        *,
        fill: Callable[[], None] = _nothing,
        hand_on: Callable[[], None] = _nothing,
        counted: int | None = None,
        along: Callable[[], Sequence[Synchronization]] = tuple,
        last: bool = False,
        end: Callable[[], None] = _nothing,
    ) -> None:
        """Queues the average of a flat buffer, in place. Whatever is given to be called is called on the wire's thread.

        Args:
            wire: What it is sent on.
            unit: Says who handles which of its parameters.
            gradient: ``float32[numel]``.
            fill: Writes the buffer.
            hand_on: Takes the average from it.
            counted: Bytes of the gradients that it stands for; they are counted, and the step with its last buffer's.
            along: What else is sent with it, ahead of it.
            last: Whether it is a step's last buffer.
            end: Called at the end of a step whose last buffer it is.
        """
        for guard in self.guards:
            guard.on_arrival()

        def begin() -> list[Synchronization]:
            fill()
            started = [*along(), *self.synchronizations(unit(), gradient)]
            if counted is not None:
                self.count(counted, last)
            return started

        def done() -> None:
            self.after_decode(unit(), gradient)
            hand_on()

        def ended() -> None:
            end()
            self.after_step()

        wire.submit(begin, done, ended if last else None)

    def end_step(self, wire: Wire, end: Callable[[], None] = _nothing) -> None:
        """Queues the end of a step, where it was not known which buffer would be its last.

        Args:
            wire: What the step's averages are sent on.
            end: Called on the wire's thread when all of them have been handed on.
        """

        def begin() -> list[Synchronization]:
            self.count(0, True)
            return []

        def ended() -> None:
            end()
            self.after_step()

        wire.submit(begin, _nothing, ended)

    def synchronizations(self, unit: Unit, gradient: Tensor) -> list[Synchronization]:
        """Starts the average of a buffer, ``float32[numel]``, in place."""
        for guard in self.guards:
            guard.before_encode(unit, gradient)
        if self.averages_densely:
            shares = self._dense(unit)
        else:
            shares = self.shares(unit)
            taken = take_owed(self.store, unit.slots, gradient)
            self._taken |= taken
            for slot in [each for each in unit.slots if each.name in taken]:
                part, rule = gradient[slot.offset : slot.stop], self.now.rule(slot.name)
                self._left[slot.name] = left_over(rule, slot.shape, part, taken[slot.name])
        started = [share.synchronize(gradient, self.step - self.dense_steps) for share in shares]
        return started + [further for guard in self.guards for further in guard.beside(unit, gradient)]

    def give_back(self, slot: Slot, average: Tensor) -> None:
        """Owes a parameter's average again that nobody takes."""
        rule, taken = self.now.rule(slot.name), self._taken.get(slot.name)
        give_back(self.store, slot, rule, average, taken, self.rank, self.nodes)

    def after_decode(self, unit: Unit, average: Tensor) -> None:
        """To be called when a buffer holds its average, before that is handed on."""
        for slot in [each for each in unit.slots if each.name in self._left]:
            self._came[slot.name] = average[slot.offset : slot.stop].isfinite().all()
        for guard in reversed(self.guards):
            guard.after_decode(unit, average)

    def after_step(self) -> None:
        """To be called when all averages of a step have been handed on.

        What a step took along whose average is not finite is owed as before; if any did, the host waits for it.
        """
        for name, finite in self._came.items():
            if not finite and self.store.get(OWED, name) is None:
                self.store.put(OWED, name, self._left[name], Kind.MEAN)
        self._left.clear()
        self._came.clear()
        for guard in reversed(self.guards):
            guard.after_step()
        self._taken.clear()
        self._go_by(self.configuration.at(self.step - self.dense_steps))

    def dense_bytes(self, nbytes: int) -> int:
        """What a dense average of a gradient of ``nbytes`` hands over: of this rank's share, where nodes share it."""
        nodes = self.nodes
        if nodes is None:
            return all_reduce_bytes(nbytes, self.world_size)
        return all_reduce_bytes(nbytes // nodes.workers, nodes.count)

    def count(self, nbytes: int, last: bool) -> None:
        """Counts a gradient of so many bytes that was taken in, and the step if it is the step's last."""
        self.meter.dense_bytes += self.dense_bytes(nbytes)
        self.under_way = not last
        if last:
            if self.averages_densely:
                self.store.clear(Kind.GIVEN)
            self.step += 1
            self.meter.steps += 1
