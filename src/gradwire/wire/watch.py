"""Collectives that a device is at: the host hears nothing of them unless it asks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from gradwire.errors import WireError


class Work(Protocol):
    """What a backend gives for a collective; ``torch.distributed.Work`` is one."""

    def is_completed(self) -> bool:
        """Whether the device is through with it; asking waits for nothing."""
        ...


@dataclass(frozen=True)
class _Operation:
    name: str
    works: Sequence[Work]
    issued: float


class Watch:
    """Finds the collective that a device has been at for too long.

    Waiting for one on a device's stream returns at once, so a worker that has gone shows itself to nobody: NCCL's own
    watchdog ends the process then. Who watches hears of it before, provided that the backend has more patience than
    this.

    Args:
        limit: How long a collective may take; for ever if None.
    """

    def __init__(self, limit: timedelta | None) -> None:
        self._limit = limit
        self._under_way: deque[_Operation] = deque()

    def add(self, name: str, works: Sequence[Work], issued: float) -> None:
        """Watches a collective, issued after all others at ``time.monotonic()``."""
        self._under_way.append(_Operation(name, works, issued))

    def look(self) -> None:
        """Forgets what is through.

        Raises:
            WireError: If the oldest of what is not has taken longer than the limit.
        """
        while self._under_way and all(work.is_completed() for work in self._under_way[0].works):
            self._under_way.popleft()
        if self._under_way and self._limit is not None:
            oldest, limit = self._under_way[0], self._limit.total_seconds()
            seconds = time.monotonic() - oldest.issued
            if seconds > limit:
                raise WireError(oldest.name, seconds, limit, "the device is not through with it")
