"""What a worker computes: a model's parameters in buckets, and when their gradients come."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradwire.cost.shapes import Model, NamedShape
from gradwire.errors import ConfigurationError
from gradwire.layout import Slot, flat_slots

BACKWARD = 2 / 3
"""The share of a step that is backward: it has two products of matrices where forward has one."""

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
"""DDP's limits, of its first bucket and of all others."""


@dataclass(frozen=True)
class Workload:
    """A step of one worker without its averages.

    Attributes:
        buckets: Parameters in the order in which their gradients come.
        backward: Seconds of work until each bucket is ready, one after another.
        forward: Seconds of the step before and after backward.
        dtype: Of the gradients as DDP would send them; of several the widest.
    """

    buckets: tuple[tuple[Slot, ...], ...]
    backward: tuple[float, ...]
    forward: float
    dtype: torch.dtype = torch.float32

    @property
    def seconds(self) -> float:
        """All of the step."""
        return self.forward + sum(self.backward)

    @property
    def values(self) -> int:
        """Parameters of the model."""
        return sum(slot.numel for bucket in self.buckets for slot in bucket)

    @classmethod
    def of(cls, model: Model, step_seconds: float, copy: float = 0.0) -> Workload:
        """A model whose step takes so long, of which two thirds are backward.

        Args:
            model: Its parameters, and how a backward pass divides its time among them.
            step_seconds: Forward, backward and the optimizer; 0 for averages alone.
            copy: Seconds a value in which DDP takes gradients over into its buckets.
        """
        if not 0 <= step_seconds < math.inf:
            raise ConfigurationError(f"step_time={step_seconds!r} is out of range; give seconds of 0 or more")
        buckets = bucketed(model.parameters, model.dtype.itemsize)
        works = [sum(model.work(name, shape) for name, shape in bucket) for bucket in buckets]
        whole = sum(works) or 1.0
        slots = tuple(flat_slots(bucket) for bucket in buckets)
        backward = tuple(
            BACKWARD * step_seconds * work / whole + copy * bucket[-1].stop
            for work, bucket in zip(works, slots, strict=True)
        )
        return cls(slots, backward, (1 - BACKWARD) * step_seconds, model.dtype)

    @property
    def whole(self) -> tuple[Slot, ...]:
        """All parameters in one buffer, as with ``granularity="model"``."""
        return flat_slots([(slot.name, slot.shape) for bucket in self.buckets for slot in bucket])


def bucketed(parameters: Sequence[NamedShape], value_bytes: int = 4) -> list[list[NamedShape]]:
    """As DDP forms its buckets of gradients: from the last parameter on, until a limit is reached."""
    buckets: list[list[NamedShape]] = []
    current: list[NamedShape] = []
    size = 0
    for name, shape in reversed(parameters):
        current.append((name, shape))
        size += value_bytes * math.prod(shape)
        if size >= (BUCKET_BYTES if buckets else FIRST_BUCKET_BYTES):
            buckets.append(current)
            current, size = [], 0
    return buckets + [current] * bool(current)
