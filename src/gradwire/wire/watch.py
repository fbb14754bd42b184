"""Collectives that a device is at: the host hears nothing of them unless it asks."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from gradwire.errors import WireError


class Work(Protocol):
    """What a backend gives for a collective; ``torch.distributed.Work`` is one."""

    def is_completed(self) -> bool:
        """Whether the device is through with it, or it failed; asking waits for nothing."""
        ...


@dataclass(frozen=True)
class _Operation:
    name: str
    works: Sequence[Work]
    issued: float


def _nothing() -> str:
    return ""


class Watch:
    """Finds the collective that failed on a device, or that one has been at for too long.

    Waiting for one on a device's stream returns at once, so a worker that has gone shows itself to nobody: NCCL's own
    watchdog ends the process then. Who watches hears of it before, provided that the backend has more patience than
    this.

    Args:
        limit: How long a collective may take; for ever if None.
        failure: Says what the backend has found to have failed, if anything: to a collective that failed a device is
            through with it, too.
    """

    def __init__(self, limit: timedelta | None, failure: Callable[[], str] = _nothing) -> None:
        self._limit = limit
        self._failure = failure
        self._under_way: deque[_Operation] = deque()
        self._newest = ""
        self._asking = threading.Lock()

    def add(self, name: str, works: Sequence[Work], issued: float) -> None:
        """Watches a collective, issued after all others at ``time.monotonic()``.

        What is through is let go of, and with it the tensors that it holds.
        """
        with self._asking:
            self._forget()
            self._under_way.append(_Operation(name, works, issued))
            self._newest = name

    def look(self) -> None:
        """Forgets what is through.

        Raises:
            WireError: If a collective has failed, or the oldest of what is under way has taken longer than the limit.
        """
        with self._asking:
            oldest = self._under_way[0] if self._under_way else None
            self._forget()
            limit = None if self._limit is None else self._limit.total_seconds()
            if failure := self._failure():
                seconds = 0.0 if oldest is None else time.monotonic() - oldest.issued
                raise WireError(self._newest if oldest is None else oldest.name, seconds, limit, failure)
            if self._under_way and limit is not None:
                oldest = self._under_way[0]
                seconds = time.monotonic() - oldest.issued
                if seconds > limit:
                    raise WireError(oldest.name, seconds, limit, "the device is not through with it")

    def _forget(self) -> None:
        while self._under_way and all(work.is_completed() for work in self._under_way[0].works):
            self._under_way.popleft()
