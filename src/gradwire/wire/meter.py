"""Bytes handed over and seconds spent, counted where they happen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

Stage = Literal["encode", "wire", "decode"]


@dataclass
class Meter:
    """Counts what one rank hands over to be sent; see :class:`gradwire.Stats`."""

    steps: int = 0
    dense_bytes: int = 0
    wire_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"encode": 0.0, "wire": 0.0, "decode": 0.0})

    def copy(self) -> Meter:
        """The counts as they are now."""
        return replace(self, seconds=dict(self.seconds))

    def dense(self, nbytes: int, world_size: int) -> None:
        """Counts a gradient of ``nbytes`` that plain training would all-reduce."""
        self.dense_bytes += all_reduce_bytes(nbytes, world_size)

    def all_reduce(self, nbytes: int, world_size: int) -> None:
        """Counts a buffer of ``nbytes`` reduced in place: each worker sends 2 (n - 1) / n of it."""
        self.wire_bytes += all_reduce_bytes(nbytes, world_size)

    def all_gather(self, nbytes: int, world_size: int) -> None:
        """Counts a payload of ``nbytes`` that goes to n - 1 others."""
        self.wire_bytes += nbytes * (world_size - 1)

    def all_to_all(self, nbytes: int, world_size: int) -> None:
        """Counts n rows of ``nbytes`` together, of which this worker keeps one."""
        self.wire_bytes += nbytes // world_size * (world_size - 1)

    def broadcast(self, nbytes: int, distance: int, world_size: int) -> None:
        """Counts a buffer of ``nbytes`` that comes down a binomial tree to the rank ``distance`` after its source."""
        reach = 1
        while reach < world_size:
            if distance < reach and distance + reach < world_size:
                self.wire_bytes += nbytes
            reach *= 2

    def exchange(self, nbytes: int) -> None:
        """Counts a payload of ``nbytes`` that goes to one other."""
        self.wire_bytes += nbytes

    @contextmanager
    def stage(self, stage: Stage) -> Iterator[None]:
        """Adds the time of its body to a stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - start


def all_reduce_bytes(nbytes: int, world_size: int) -> int:
    """What one worker sends in a ring all-reduce of ``nbytes``: 2 (n - 1) / n of it."""
    return 2 * (world_size - 1) * nbytes // world_size
