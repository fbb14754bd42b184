"""A spike leaves no more in memories than a large step does."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.deferred import known
from gradwire.engine.guards.guard import Guard, Progress
from gradwire.engine.unit import Unit
from gradwire.errors import ConfigurationError
from gradwire.layout import Slot
from gradwire.memory import Kind

USUAL = "usual_norm"
"""The store's field for the norm that gradients of a parameter have had of late on this worker."""

SEEN = "usual_steps"
"""The store's field for how many gradients of a parameter told it."""

FIRST_STEPS = 10
"""Gradients that only tell what is usual."""

SHARE = 0.1
"""Of the newest norm in what is usual."""


class Spikes(Guard):
    """Scales down a worker's gradients that are far larger than usual, before they are compressed.

    Clipping after the average does not undo a spike where a memory keeps most of it and hands it out for as many steps
    as it takes: what is clipped is then the same spike, again and again. So a buffer's gradient longer than ``times``
    the usual length of the worker's whole gradient is scaled to that. What is usual is a running mean of each
    parameter's norm, which takes in what was scaled: lasting changes are followed within some steps. Zeros tell nothing
    of it once there was anything else: so it stays where a worker has no inputs for a while.

    Each worker looks at its own gradients, as DGC's local clipping does (Lin et al. 2018, arXiv:1712.01887); relative
    to a running mean, as AdaGC's (Wang et al. 2025, arXiv:2502.11034). It takes a pass over each gradient, and another
    one over what is scaled.

    Args:
        times: How many times the usual length is a spike; above 1.
        names: All parameters.
        progress: The engine, whose store keeps what is usual.
    """

    def __init__(self, times: float, names: Sequence[str], progress: Progress) -> None:
        self._times = times
        self._names = names
        self._progress = progress
        self._most: Tensor | None = None

    def before_encode(self, unit: Unit, gradient: Tensor) -> None:
        """Scales a gradient, if it is a spike, and takes it in."""
        slots = [slot for slot in unit.slots if slot.numel]
        if not slots:
            return
        store = self._progress.store
        if self._most is None:
            self._most = self._times * _length([store.get(USUAL, name) for name in self._names], gradient)
        norms = torch.stack(torch._foreach_norm([gradient[slot.offset : slot.stop] for slot in slots]))
        length = torch.linalg.vector_norm(norms)
        is_spike = length.isfinite() & (length > self._most) & (self._most > 0)
        before, seen = (self._kept(field, slots, norms) for field in (USUAL, SEEN))
        is_spike &= (seen >= FIRST_STEPS).all()
        if not known(~is_spike):
            scale = torch.where(is_spike, self._most / length, 1.0)
            gradient.mul_(scale)
            norms *= scale
        tells = norms.isfinite() & ((length > 0) | (before == 0))
        seen += tells
        now = torch.where(tells, torch.lerp(before, norms, (1 / seen).clamp(min=SHARE)), before)
        for slot, norm, steps in zip(slots, now.unbind(), seen.unbind(), strict=True):
            store.put(USUAL, slot.name, norm, Kind.PRIVATE)
            store.put(SEEN, slot.name, steps, Kind.PRIVATE)

    def _kept(self, field: str, slots: Sequence[Slot], like: Tensor) -> Tensor:
        """Of these parameters, in order; zero where nothing is known yet."""
        kept = [self._progress.store.get(field, slot.name) for slot in slots]
        return torch.stack([like.new_zeros(()) if each is None else each for each in kept])

    def after_step(self) -> None:
        """What is usual is read anew in the next step."""
        self._most = None

    def __str__(self) -> str:
        return f"spikes beyond {self._times:g} times the usual"


def _length(norms: Sequence[Tensor | None], like: Tensor) -> Tensor:
    """Of a gradient whose parts have these norms."""
    there = [norm for norm in norms if norm is not None]
    return torch.linalg.vector_norm(torch.stack(there)) if there else like.new_zeros(())


def check_spikes(times: object) -> None:
    """Raises ConfigurationError unless ``times`` is a number above 1, or None."""
    if times is None or (isinstance(times, int | float) and not isinstance(times, bool) and 1 < times < math.inf):
        return
    raise ConfigurationError(
        f"clip_spikes={times!r} is out of range; choose how many times the usual norm is a spike, above 1, such as 4, "
        "or None to clip nothing"
    )
