"""From flat gradient buffers to synchronizations, whatever brought the buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gradwire.codecs.codec import Codec
from gradwire.deferred import Later
from gradwire.engine.configuration import Configuration
from gradwire.engine.guards import Guard
from gradwire.engine.mixture import Mixture
from gradwire.engine.unit import Share, Unit
from gradwire.errors import ConfigurationError
from gradwire.layout import Block, Slot, flat_slots
from gradwire.memory import Kind, Memory, NoMemory, Store
from gradwire.methods import Context, Dense, Method
from gradwire.wire import Meter, Synchronization, Wire
from gradwire.wire.meter import marks_of

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

    Attributes:
        guards: What goes along with every gradient, the outermost first.
        later: What the host is told of a step in the next.
        step: Averages made so far.
        under_way: Whether some of a step's gradients have been taken in and others not yet.
    """

    def __init__(
        self, configuration: Configuration | Mixture, rank: int, world_size: int, device: torch.device
    ) -> None:
        self.configuration = configuration
        self.guards: list[Guard] = []
        self.store = Store(device)
        self.meter = Meter(mark=marks_of(device))
        self.later = Later()
        self.step = 0
        self.under_way = False
        self.rank = rank
        self.world_size = world_size
        self._paused_at: int | None = None
        self._missed = 0
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

    def unit(self, slots: Sequence[Slot]) -> Unit:
        """Decides who handles the parameters of a buffer, and moves their memories to its layout."""
        shares = []
        for rule in self.configuration.rules:
            own = [slot for slot in slots if slot.numel and self.configuration.rule(slot.name) is rule]
            taken = [slot for slot in own if rule.compresses(slot.shape)]
            left = [slot for slot in own if not rule.compresses(slot.shape)]
            if taken:
                shares.append(self._compressed(rule, taken))
            if left:
                alone = flat_slots([(slot.name, slot.shape) for slot in left])
                share = self._share(
                    rule, DENSE, alone, alone[-1].stop, DENSE.routes[0], rule.memory.uncompressed(), None
                )
                shares.append(replace(share, aside=Block.cut(left, rule.granularity)))
        return Unit(tuple(slots), max((slot.stop for slot in slots), default=0), tuple(shares))

    def _compressed(self, rule: Configuration, slots: Sequence[Slot]) -> Share:
        """What compresses some parameters, in the stretch of the buffer from the first to the last of them."""
        start, stop = min(slot.offset for slot in slots), max(slot.stop for slot in slots)
        moved = [replace(slot, offset=slot.offset - start) for slot in slots]
        share = self._share(rule, rule.method, moved, stop - start, rule.route, rule.memory, rule.owner)
        return replace(share, offset=start)

    def _share(
        self,
        rule: Configuration,
        method: Method,
        slots: Sequence[Slot],
        numel: int,
        route: str,
        memory: Memory,
        owner: Codec | None,
    ) -> Share:
        block = Block.cut(slots, rule.granularity)
        memory = memory.fitted(method.worker_bound(int(block.segment_numels.max())))
        context = Context(block, numel, self.store, memory, route, owner, self.rank, self.world_size, rule.seed)
        return Share(method, context, method.init(context))

    def _dense(self, unit: Unit) -> tuple[Share, ...]:
        """The average of a whole buffer as ``"dense"`` makes it; kept for as long as the unit is in use."""
        shares = self._uncompressed.get(unit)
        if shares is None:
            slots, rule = [slot for slot in unit.slots if slot.numel], self.configuration.rules[0]
            route, memory = DENSE.routes[0], NoMemory()
            shares = (self._share(rule, DENSE, slots, unit.numel, route, memory, None),) if slots else ()
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
        counted: Tensor | None = None,
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
            counted: The gradients that it stands for, whose bytes are counted, and the step with its last buffer's.
            along: What else is sent with it.
            last: Whether it is a step's last buffer.
            end: Called at the end of a step whose last buffer it is.
        """

        def begin() -> list[Synchronization]:
            fill()
            started = [*self.synchronizations(unit(), gradient), *along()]
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
            self.count(torch.empty(0, dtype=torch.float32), True)
            return []

        def ended() -> None:
            end()
            self.after_step()

        wire.submit(begin, _nothing, ended)

    def synchronizations(self, unit: Unit, gradient: Tensor) -> list[Synchronization]:
        """Starts the average of a buffer, ``float32[numel]``, in place."""
        for guard in self.guards:
            guard.before_encode(unit, gradient)
        shares = self._dense(unit) if self.averages_densely else unit.shares
        started = [share.synchronize(gradient, self.step - self.dense_steps) for share in shares]
        return started + [further for guard in self.guards for further in guard.beside(unit, gradient)]

    def after_decode(self, unit: Unit, average: Tensor) -> None:
        """To be called when a buffer holds its average, before that is handed on."""
        for guard in reversed(self.guards):
            guard.after_decode(unit, average)

    def after_step(self) -> None:
        """To be called when all averages of a step have been handed on."""
        for guard in reversed(self.guards):
            guard.after_step()

    def count(self, gradient: Tensor, last: bool) -> None:
        """Counts a gradient that was taken in, and the step if it is the step's last."""
        self.meter.dense(gradient.nbytes, self.world_size)
        self.under_way = not last
        if last:
            if self.averages_densely:
                self.store.clear(Kind.GIVEN)
            self.step += 1
            self.meter.steps += 1
