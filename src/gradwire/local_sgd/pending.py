"""Averages on their way: sent off, waited for, and taken.

They go stretch by stretch, about a million coordinates each. Where training waits for them, the wire's thread measures
a stretch's change just before it encodes it, while it is in the cache, and turns its average into the next anchor as it
lands; then anchor and change swap places. So before the first byte there is one stretch to measure, and after the last
one to decode and a copy to the parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwire.engine.engine import Engine
from gradwire.engine.unit import Unit
from gradwire.local_sgd.beside import Beside, Values, averaged, in_step
from gradwire.local_sgd.finite import finite
from gradwire.local_sgd.fragments import Fragment, Stretch
from gradwire.memory import Snapshot
from gradwire.wire import Synchronization, Wire

_log = logging.getLogger("gradwire")

NEXT = 1 << 62
"""So many local steps late is when the fragment's next average is sent."""


@dataclass(eq=False)
class PendingAverage:
    """An average on its way.

    Attributes:
        fragment: Of what.
        due: The local step after which it is taken.
        mix: Weight of the average where it is taken.
        outer: What takes it for a gradient, if anything does.
        beside: What is averaged with it.
        dropped: Whether it turned out not to be finite.
        landing: Waits until it has landed, and raises whatever went wrong on the wire; None once it has.
    """

    fragment: Fragment
    due: int
    mix: float
    outer: Optimizer | None
    beside: Values
    dropped: bool = False
    landing: Callable[[], None] | None = None

    @property
    def eager(self) -> bool:
        """Whether local steps went on from a guess, and what they did counts with the fragment's next average."""
        return self.due >= NEXT

    def wait(self) -> None:
        """Waits until it has landed.

        Raises:
            Exception: Whatever went wrong on the wire.
        """
        if self.landing is not None:
            self.landing()
            self.landing = None


@dataclass(frozen=True, eq=False)
class _Part:
    """A stretch, who handles it, and what they remembered before its last average."""

    stretch: Stretch
    unit: Unit
    before: Snapshot

    @classmethod
    def of(cls, stretch: Stretch, engine: Engine) -> _Part:
        names = [piece.name for piece, _, _ in stretch.pieces]
        return cls(stretch, engine.unit(stretch.slots), Snapshot(engine.store, names))


class PendingAverages:
    """Sends off how far local steps took fragments, and moves the model by the averages that come back.

    To be called on the thread that trains.

    Args:
        fragments: What is averaged.
        beside: What goes along with it.
        engine: Averages, and remembers.
        wire: What it is sent on.

    Attributes:
        taken: Averages taken, each fragment's counted for itself.
        dropped: Averages that were not taken because they were not finite.
        kept: The keys of a state.
    """

    kept = ("syncs", "dropped", "rounds", "level", "anchors", "origins", "changes", "flights")

    def __init__(self, fragments: Sequence[Fragment], beside: Sequence[Beside], engine: Engine, wire: Wire) -> None:
        self._fragments = fragments
        self._beside = beside
        self._engine = engine
        self._wire = wire
        self._parts = [[_Part.of(stretch, engine) for stretch in each.stretches] for each in fragments]
        self._under_way: list[PendingAverage] = []
        self.taken = self.dropped = 0

    @property
    def dues(self) -> list[int]:
        """The local steps after which something that is on its way is taken."""
        return [flight.due for flight in self._under_way]

    def wait(self) -> None:
        """Waits until all that is on its way has landed; it is taken when it is due.

        Raises:
            Exception: Whatever went wrong on the wire.
        """
        for flight in self._under_way:
            flight.wait()

    def launch(self, fragment: Fragment, now: int, late: int, mix: float, outer: Optimizer | None) -> None:
        """Measures how far a fragment went, and queues its average stretch by stretch.

        An average of the fragment that is still on its way is taken first.

        Args:
            fragment: What is averaged.
            now: Local steps taken.
            late: Local steps until the average is taken; ``NEXT`` for eager updates.
            mix: Weight of the average where it is taken.
            outer: What takes it for a gradient, if anything does.
        """
        self._take([flight for flight in self._under_way if flight.fragment is fragment], now)
        engine, wire, parts = self._engine, self._wire, self._parts[fragment.number]
        beside: Values = {}
        going = () if late == NEXT else self._beside  # taken so late they would undo a whole period of local steps
        averages = any(each.averages(fragment) for each in going)
        for each in going:
            beside.update(each.collect(fragment))
        landing = wire.promise()
        flight = PendingAverage(fragment, now + late, mix, outer, beside, landing=lambda: wire.wait(landing))
        step = fragment.rounds

        def along() -> list[Synchronization]:
            device = fragment.change.device
            return [in_step(now, device), *([averaged(beside, device)] if averages else [])]

        def end() -> None:
            engine.later.settle()  # or what a dropped average left would come after it was taken back
            flight.dropped |= not all(map(finite, beside.values()))
            if flight.dropped:
                for part in parts:
                    part.before.restore()
            elif not engine.paused:
                fragment.rounds += 1
            wire.keep(landing, fragment.change)

        def queue(part: _Part) -> None:
            stretch = part.stretch

            def fill() -> None:
                if not late:
                    stretch.measure()
                engine.go_on(step, 0, paused=engine.paused)  # the method's steps: averages of a pause are none of them
                part.before.take()

            def hand_on() -> None:
                flight.dropped |= not finite(stretch.change)
                if outer is None:
                    stretch.land()

            first, last = part is parts[0], part is parts[-1]
            more = along if first else tuple
            engine.average(
                wire, lambda: part.unit, stretch.change, fill=fill, hand_on=hand_on, along=more, last=last, end=end
            )

        for part in parts:
            if late:  # local steps go on meanwhile; otherwise the wire does it, just before it encodes
                part.stretch.measure()
        if late == NEXT:
            fragment.look_ahead(outer, 1 / engine.world_size)
        for part in parts:
            queue(part)
        self._under_way.append(flight)

    def average_beside(self, fragment: Fragment, beside: Beside, now: int) -> None:
        """Averages at once what goes along with a fragment, and leaves the fragment as it is.

        Args:
            fragment: Whose parameters all ranks have already.
            beside: What is averaged.
            now: Local steps taken.

        Raises:
            Exception: Whatever went wrong on the wire.
        """
        values = beside.collect(fragment)
        flight = PendingAverage(fragment, now, 1.0, None, values)
        landing = self._wire.promise()

        def begin() -> list[Synchronization]:
            return [averaged(values, fragment.change.device)]

        self._wire.submit(begin, lambda: None, lambda: self._wire.keep(landing, fragment.change))
        self._wire.wait(landing)
        if all(map(finite, values.values())):
            beside.take(fragment, values)
            return
        self._tell(flight, now)
        self.dropped += 1
        beside.drop(fragment, alone=False)

    def take(self, now: int) -> None:
        """Takes what is due after ``now`` local steps, once it has landed.

        Raises:
            Exception: Whatever went wrong on the wire.
        """
        self._take([flight for flight in self._under_way if flight.due <= now], now)

    def take_all(self, now: int) -> None:
        """Takes what is on its way, due or not.

        Raises:
            Exception: Whatever went wrong on the wire.
        """
        self._take(list(self._under_way), now)

    @torch.no_grad()
    def _take(self, flights: Sequence[PendingAverage], now: int) -> None:
        """Waits for averages and moves the model by them."""
        for flight in flights:
            self._under_way.remove(flight)
            flight.wait()  # for all of them first: until then the wire may still measure what others changed
        for flight in flights:
            fragment = flight.fragment
            alone = flight.eager and any(each.averages(fragment) for each in self._beside)  # not with what is beside
            if (flight.dropped and not alone) or (flight.mix == 1 and not flight.eager):
                fragment.level = now
            if flight.dropped:
                self._tell(flight, now)
                self.dropped += 1
                for other in self._fragments:  # its next step would not be finite because of others here that are not
                    if other is fragment or not other.finite():
                        other.hand_on(mix=1.0)
                        for each in self._beside:
                            each.drop(other, alone=flight.eager)
                continue
            fragment.move(flight.outer)
            if not flight.eager:
                fragment.hand_on(flight.mix)
            for each in self._beside:
                each.take(fragment, flight.beside)
            self.taken += 1

    def _tell(self, flight: PendingAverage, now: int) -> None:
        """Says, once and on one rank, that an average is not taken: training may stand still otherwise unnoticed."""
        if not (self.dropped or self._engine.rank):
            found = [name for name, each in flight.beside.items() if not finite(each)]
            _log.warning(
                "after %d local steps the average of %s is not finite, so it is not taken, and parameters go back to "
                "where the last one left them; handle.dropped counts such averages, later ones are not told",
                *(now, ", ".join(found[:3]) or "what they changed"),
            )

    def state(self) -> dict[str, Any]:
        """Where the last averages left the model, and what is on its way, which is waited for.

        Raises:
            Exception: Whatever went wrong on the wire.
        """
        self.wait()
        flying = [flight.fragment for flight in self._under_way]
        return {
            "syncs": self.taken,
            "dropped": self.dropped,
            "rounds": [fragment.rounds for fragment in self._fragments],
            "level": [fragment.level for fragment in self._fragments],
            "anchors": copied(each for fragment in self._fragments for each in fragment.named(fragment.anchor)),
            "origins": copied(
                each
                for fragment in self._fragments
                if fragment.origin is not fragment.anchor
                for each in fragment.named(fragment.origin)
            ),
            "changes": copied(each for fragment in flying for each in fragment.named(fragment.change)),
            "flights": [
                {
                    "fragment": flight.fragment.number,
                    "due": flight.due,
                    "mix": flight.mix,
                    "outer": flight.outer is not None,
                    "dropped": flight.dropped,
                    "beside": copied(flight.beside.items()),
                }
                for flight in self._under_way
            ],
        }

    def load(self, saved: Mapping[str, Any], outer: Optimizer | None) -> None:
        """Goes on from where :meth:`state` was taken; ``outer`` takes what such an optimizer was to take."""
        self.taken, self.dropped = saved["syncs"], saved["dropped"]
        numbers = [flight["fragment"] for flight in saved["flights"]]
        for fragment, rounds, level in zip(self._fragments, saved["rounds"], saved["level"], strict=True):
            fragment.rounds, fragment.level = rounds, level
            for name, anchor in fragment.named(fragment.anchor):
                anchor.copy_(saved["anchors"][name])
            for name, origin in fragment.named(fragment.origin) if fragment.origin is not fragment.anchor else ():
                origin.copy_(saved["origins"][name])
            for name, change in fragment.named(fragment.change) if fragment.number in numbers else ():
                change.copy_(saved["changes"][name])
        self._under_way = [
            PendingAverage(
                self._fragments[flight["fragment"]],
                flight["due"],
                flight["mix"],
                outer if flight["outer"] else None,
                {name: each.to(self._engine.store.device) for name, each in flight["beside"].items()},
                flight["dropped"],
            )
            for flight in saved["flights"]
        ]


def copied(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Copies on the CPU, by name."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors}
