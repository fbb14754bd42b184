"""Bytes handed over and seconds spent, counted where they happen.

Seconds are the host's on the CPU. A device is behind the host, so there they are those between two events on the wire's
stream, which are read once it is through with them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch

Stage = Literal["encode", "wire", "decode"]


class Event(Protocol):
    """A moment on a device's stream; ``torch.cuda.Event`` is one."""

    def query(self) -> bool:
        """Whether the device has come to it."""
        ...

    def elapsed_time(self, later: Any) -> float:
        """Milliseconds from here to another one, once the device has come to both."""
        ...


Marks = Callable[[], Event]
"""Marks the moment on the current stream."""


def marks_of(device: torch.device) -> Marks | None:
    """What marks moments on a device; None where the host's clock serves."""
    if device.type != "cuda":
        return None

    stream: torch.cuda.Stream | None = None

    def mark() -> Event:
        nonlocal stream
        # Asking for the stream takes longer than all else here; whether it is still the same takes next to nothing.
        if stream is None or torch._C._cuda_getCurrentRawStream(stream.device_index) != stream.cuda_stream:
            stream = torch.cuda.current_stream(device)
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    return mark


@dataclass
class Tally:
    """Counts what one rank hands over to be sent in collectives, as their algorithms send it."""

    wire_bytes: int = 0

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


@dataclass
class Meter(Tally):
    """What one rank counts; see :class:`gradwire.Stats`.

    Attributes:
        node: What goes to workers of the same node, as it is asked for; it is not among ``wire_bytes``.
        seconds: By stage; on a device, of what it was through with at the end of the last stage.
        mark: Marks moments on a device's stream; None for the host's clock.
        edge: When the last stage ended on it, as long as nothing has come after that; the next one begins there.
    """

    node: Tally = field(default_factory=Tally)
    steps: int = 0
    dense_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"encode": 0.0, "wire": 0.0, "decode": 0.0})
    mark: Marks | None = None
    edge: Event | None = field(default=None, repr=False)
    _running: deque[tuple[Stage, Event, Event]] = field(default_factory=deque, repr=False)

    def scattered(self, nbytes: int, world_size: int) -> None:
        """Counts a gradient of ``nbytes`` that plain sharding would reduce-scatter, which sends (n - 1) / n of it."""
        self.dense_bytes += nbytes // world_size * (world_size - 1)

    def copy(self) -> Meter:
        """The counts as they are now."""
        return replace(self, node=replace(self.node), seconds=dict(self.seconds), edge=None, _running=deque())

    def stage(self, stage: Stage) -> _Metered:
        """Adds the time of what is done within it to a stage; on a device, once it is through with it."""
        return _Metered(self, stage)

    def settle(self) -> None:
        """Adds up what a device is through with of earlier steps; to be called before a step, when nobody waits."""
        while self._running and self._running[0][2].query():
            passed, first, last = self._running.popleft()
            self.seconds[passed] += first.elapsed_time(last) / 1000


class _Metered:
    """A stage that is under way; no generator, since there are many in a step and nothing hides what the host takes."""

    __slots__ = ("_begun", "_meter", "_stage", "_start")

    def __init__(self, meter: Meter, stage: Stage) -> None:
        self._meter, self._stage = meter, stage

    def __enter__(self) -> None:
        meter = self._meter
        self._begun = None if meter.mark is None else meter.edge or meter.mark()
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        meter = self._meter
        if self._begun is None or meter.mark is None:
            meter.seconds[self._stage] += time.perf_counter() - self._start
        else:
            meter.edge = meter.mark()
            meter._running.append((self._stage, self._begun, meter.edge))


def all_reduce_bytes(nbytes: int, world_size: int) -> int:
    """What one worker sends in a ring all-reduce of ``nbytes``: 2 (n - 1) / n of it."""
    return 2 * (world_size - 1) * nbytes // world_size
