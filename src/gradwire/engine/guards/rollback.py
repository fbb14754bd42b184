"""A step that is not finite leaves no trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby

import torch
from torch import Tensor

from gradwire.engine.guards.guard import Guard, Progress
from gradwire.engine.unit import Unit
from gradwire.errors import ConfigurationError
from gradwire.memory import Snapshot


def _alone(verdict: Tensor) -> Tensor:
    return verdict


class Rollback(Guard):
    """Takes back what a step left behind, on every rank, if an average that it hands on is not finite.

    After such a step everything in the store, and the count of steps that keys all randomness, is bit for bit what it
    was before, so the next step is as if the bad one had not been. Whether a step was bad is read off the averages,
    which all ranks have alike, in one pass over each; so it needs no collective. An average that would overflow the
    dtype of its parameters is not finite, either.

    A second copy of what the store keeps is brought up to date at the end of every good step, when all averages have
    been handed on.

    Args:
        progress: The engine, whose store and count of steps to guard. This must be its first guard, to see what is
            handed on.
        dtypes: Each parameter's dtype, by name.
        agree: Makes whether a step was good, a bool, that of all who must take it back together; on the wire's thread.
    """

    def __init__(
        self, progress: Progress, dtypes: Mapping[str, torch.dtype], agree: Callable[[Tensor], Tensor] = _alone
    ) -> None:
        self._progress = progress
        self._dtypes = dtypes
        self._agree = agree
        self._before = Snapshot(progress.store)
        self._step = 0
        self._finite: Tensor | None = None

    def before_encode(self, unit: Unit, gradient: Tensor) -> None:
        """Notes where the step starts, and follows the store where a new layout of buckets has moved it."""
        if self._finite is None:
            self._step = self._progress.step
            self._finite = torch.ones((), dtype=torch.bool, device=gradient.device)
            if not self._before.current:
                self._before.take()
        elif not self._before.current:
            self._before.extend()

    def after_decode(self, unit: Unit, average: Tensor) -> None:
        """Looks for the smallest and the largest value, which are not finite if any value is not."""
        if self._finite is not None:
            for dtype, start, stop in self._stretches(unit):
                extremes = torch.stack(torch.aminmax(average[start:stop]))
                self._finite &= extremes.to(dtype).isfinite().all()

    def after_step(self) -> None:
        """Takes the step back, or copies what it left.

        Here the wire's thread waits for a device, when all averages of the step have been handed on.
        """
        self._progress.later.settle()  # or what it left would come after it was taken back
        if self._finite is None or self._agree(self._finite):
            self._before.take()
        else:
            self._before.restore()
            self._progress.step = self._step
        self._finite = None

    def _stretches(self, unit: Unit) -> list[tuple[torch.dtype, int, int]]:
        """Neighbouring parameters of one dtype: dtype, first element, and the one after the last."""
        slots = sorted((slot for slot in unit.slots if slot.numel), key=lambda slot: slot.offset)
        groups = [(dtype, list(each)) for dtype, each in groupby(slots, lambda slot: self._dtypes[slot.name])]
        return [(dtype, each[0].offset, each[-1].stop) for dtype, each in groups]

    def __str__(self) -> str:
        return "rollback"


def check_rollback(rollback: object) -> None:
    """Raises ConfigurationError unless ``rollback`` is True, False or None."""
    if not (rollback is None or isinstance(rollback, bool)):
        raise ConfigurationError(
            f"rollback={rollback!r} is not known; choose True, False, or None for wherever it is needed"
        )
