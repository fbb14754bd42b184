"""Memories in units of the update, whatever the learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from gradwire.codecs.select.variance import SECOND_MOMENTS
from gradwire.engine.guards.guard import Guard
from gradwire.engine.unit import Unit
from gradwire.errors import ConfigurationError
from gradwire.layout import Slot
from gradwire.memory import OWED, Kind, Memory, Store

RATE = "learning_rate"
"""The store's field for the rate that what is kept of a parameter was last weighed with."""


class LearningRate(Guard):
    """Weighs what was not sent by the ratio of the old learning rate to the new one, whenever it changes.

    Published error feedback remembers a part of the update, ``rate * gradient`` (Karimireddy et al. 2019,
    arXiv:1901.09847); a memory in units of the gradient would be applied at the rate of the step that sends it instead
    of the rates of the steps it comes from. With it, the updates applied and ``rate * memory`` add up to the updates
    that were due, however the rate goes. A step in which the rate has changed takes one more pass over what is kept.

    At a rate of 0, where many schedules end and some begin, a gradient is no part of any update. It is compressed
    without what is kept, and nothing of it is: that waits, at its own rate, for the rate to come back.

    Args:
        rate: Gives the current learning rate, at least 0; called once a step, by whoever asks for an average.
        store: Where memories are kept.
        owing: Gives the store's fields of what is owed of a parameter, by its name.
    """

    def __init__(self, rate: Callable[[], float], store: Store, owing: Callable[[str], Iterable[str]]) -> None:
        self._rate = rate
        self._store = store
        self._owing = owing
        self._next = 0.0
        self._now: float | None = None
        self._waiting: dict[tuple[str, str], Tensor] = {}

    def before_step(self) -> None:
        """Reads the rate.

        Raises:
            ConfigurationError: If it is negative or not finite.
        """
        self._next = _read(self._rate)

    def before_encode(self, unit: Unit, gradient: Tensor) -> None:
        """Weighs what is kept of the unit's parameters, if the rate has changed since it was weighed last."""
        if self._now is None:
            self._now = self._next
        if not self._now:
            self._set_aside(unit)
            return
        for slot in unit.slots:
            kept = self._store.get(RATE, slot.name)
            before = self._now if kept is None else float(kept)
            if kept is None or before != self._now:
                self._store.put(RATE, slot.name, torch.tensor(self._now, dtype=torch.float64), Kind.SHARED)
            if before != self._now:
                for _, owed, power in self._owed(slot):
                    owed.mul_((before / self._now) ** power)

    def after_decode(self, unit: Unit, average: Tensor) -> None:
        """Puts back what was set aside, in place of what a gradient of no update left."""
        if not self._now:
            for slot in unit.slots:
                for (field, name), owed, _ in self._owed(slot):
                    owed.copy_(self._waiting.pop((field, name), torch.zeros((), dtype=torch.float32)))
                if (OWED, slot.name) in self._waiting:  # which the step took along, as zeros
                    self._store.put(OWED, slot.name, self._waiting.pop((OWED, slot.name)))

    def after_step(self) -> None:
        """The next step has a rate of its own."""
        self._now = None

    def _set_aside(self, unit: Unit) -> None:
        for slot in unit.slots:
            for key, owed, _ in self._owed(slot):
                self._waiting[key] = owed.clone()
                owed.zero_()

    def _owed(self, slot: Slot) -> Iterator[tuple[tuple[str, str], Tensor, int]]:
        """What is kept of a parameter and must be weighed: where, what, and by which power of the ratio."""
        powers = dict.fromkeys((OWED, *self._owing(slot.name)), 1)
        for field, power in {**powers, SECOND_MOMENTS: 2}.items():
            if (owed := self._store.get(field, slot.name)) is not None:
                yield (field, slot.name), owed, power

    def __str__(self) -> str:
        return "learning rate"


def check_rate(rate: Callable[[], float] | None, memories: Sequence[Memory]) -> None:
    """Raises ConfigurationError unless there is no rate, or one that can be and memories of which it can weigh some."""
    if rate is None:
        return
    if not callable(rate):
        raise ConfigurationError(
            f"learning_rate={rate!r} cannot be called; give a function without arguments such as "
            "lambda: optimizer.param_groups[0]['lr']"
        )
    if any(memory.borrows for memory in memories) or not any(memory.owed("residual") for memory in memories):
        raise ConfigurationError(
            f"learning_rate has nothing to weigh in memory={', '.join(map(str, memories))}; choose memory='residual' "
            "or 'lowpass' in float32, or attach without it"
        )
    _read(rate)


def _read(rate: Callable[[], float]) -> float:
    try:
        value = float(rate())
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"learning_rate() failed or gave no number: {error}; give a rate, at least 0"
        ) from error
    if not 0 <= value < math.inf:
        raise ConfigurationError(
            f"learning_rate() gave {value!r}, by which no memory can be weighed; give a finite rate, at least 0"
        )
    return value
