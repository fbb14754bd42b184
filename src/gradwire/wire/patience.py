"""Waiting on gloo, which does not tell whoever waits for what had begun when a connection broke."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

SLICE = timedelta(milliseconds=200)
"""How often who waits looks whether it still should."""

FIRST_CALL_SECONDS = 1.0
"""When who waits first asks whether the others are there; then after twice as long each time."""

CLOSE_SECONDS = 1.0
"""How long closing waits for transfers."""

GRACE_SECONDS = 10.0
"""How long a collective may at least go on without a rank that is gone: that one may have had its part, and left."""


class Work(Protocol):
    """What gloo gives for something under way; ``torch.distributed.Work`` is one."""

    def is_completed(self) -> bool:
        """Whether a collective has ended."""
        ...

    def wait(self, timeout: timedelta = ...) -> bool:
        """Waits for the end."""
        ...


class Patience:
    """Waits for collectives and transfers of gloo until they end, or a rank is found to be gone.

    When a connection breaks, gloo fails the transfers that had not begun. One that is half sent or half received waits
    for its timeout, and so does a collective that has one (``Pair::signalException`` of ``gloo/transport/tcp`` passes
    by ``tx_`` and ``rx_``). A new receive from that rank fails at once, though. So who waits for long calls the roll:
    of the rank that the transfer is to or from, or of all that have a part in the collective. Of these one may have
    ended well, with the others soon to follow, so they are given as long again.

    A collective that fails leaves gloo without the memory that others still send its data to. From such a connection it
    reads no more, and does not even find it closed (``Pair::prepareRead``), so that who waits for a transfer over it
    is told that all are there. So who calls the roll also asks whether a collective has failed.

    Waiting for a collective may stop and begin again. Waiting for a transfer may not, since gloo closes all connections
    when it takes too long: a thread of its own does it, which is left behind if it never ends.

    Args:
        call_roll: Raises RuntimeError if one of some ranks is gone.
        timeout: How long one may take; for ever if None.
    """

    def __init__(self, call_roll: Callable[[Sequence[int]], object], timeout: timedelta | None) -> None:
        self._call_roll = call_roll
        self._timeout = timeout
        self._broken = threading.Event()
        self._transfers: queue.SimpleQueue[_Transfers | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._collectives: deque[Work] = deque()

    def for_collective(self, work: Work, ranks: Sequence[int]) -> Callable[[], None]:
        """What waits for a collective with some ranks; raises RuntimeError if it fails."""
        self._forget()
        self._collectives.append(work)

        def ended(within: timedelta) -> bool:
            try:
                work.wait(within)
            except RuntimeError:
                if not work.is_completed():
                    return False
                work.wait()  # it may have ended just now
            return True

        def wait() -> None:
            try:
                self._wait(ended, lambda: ranks, lambda waited: max(GRACE_SECONDS, waited))
            finally:
                self._forget()

        return wait

    def for_transfers(self, works: Sequence[Work], ranks: Sequence[int]) -> Callable[[], None]:
        """What waits for transfers with a rank each, in the order of asking; raises RuntimeError if one fails."""
        transfers = _Transfers(works, ranks)
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, name="gradwire transfers", daemon=True)
            self._thread.start()
        self._transfers.put(transfers)
        return lambda: self._wait(transfers.ended, transfers.awaited, lambda waited: 0.0)

    def break_off(self) -> None:
        """Ends all waiting with an error; may be called on any thread."""
        self._broken.set()

    def close(self, held: object) -> None:
        """Ends the thread. A collective that gloo itself still waits for holds on to ``held`` until it ends.

        Who frees a group waits for its collectives, and be it the interpreter as it ends.
        """
        self._transfers.put(None)
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
        self._forget()
        if left := [work for work in self._collectives if not work.is_completed()]:
            threading.Thread(target=_outwait, args=(left, held), name="gradwire left", daemon=True).start()

    def _forget(self) -> None:
        """Lets go of collectives that have ended well, and of their tensors."""
        with suppress(RuntimeError):
            while self._collectives and self._collectives[0].is_completed():
                self._collectives[0].wait()
                self._collectives.popleft()

    def _ask(self, ranks: Sequence[int]) -> None:
        """Raises RuntimeError if one of some ranks is gone, or a collective has failed."""
        for work in self._collectives:
            if work.is_completed():
                work.wait()
        self._call_roll(ranks)

    def _wait(
        self,
        ended: Callable[[timedelta], bool],
        awaited: Callable[[], Sequence[int]],
        grace: Callable[[float], float],
    ) -> None:
        begun, call_after = time.monotonic(), FIRST_CALL_SECONDS
        while not self._ends(ended, 0.0):
            waited = time.monotonic() - begun
            left = math.inf if self._timeout is None else self._timeout.total_seconds() - waited
            if left <= 0:
                raise RuntimeError("nothing came in time")
            if waited < call_after:
                continue
            asked = awaited()
            try:
                self._ask(asked)
            except RuntimeError:
                if self._ends(ended, min(grace(waited), left)):
                    return
                if awaited() is asked:  # else that transfer had ended, and the rank after it
                    raise
            else:
                call_after *= 2

    def _ends(self, ended: Callable[[timedelta], bool], within: float) -> bool:
        """Whether it ends in so many seconds or a slice."""
        latest = time.monotonic() + within
        while not ended(SLICE):
            if self._broken.is_set():
                raise RuntimeError("it was broken off")
            if time.monotonic() >= latest:
                return False
        return True

    def _follow(self) -> None:
        while (transfers := self._transfers.get()) is not None:
            transfers.wait(self._timeout)
            del transfers  # and what they send


class _Transfers:
    """Transfers that end together, waited for on one thread and asked about on another."""

    def __init__(self, works: Sequence[Work], ranks: Sequence[int]) -> None:
        self._works = works
        self._ranks = ranks
        self._awaited: Sequence[int] = ()
        self._outcome: queue.SimpleQueue[RuntimeError | None] = queue.SimpleQueue()

    def wait(self, timeout: timedelta | None) -> None:
        try:
            for work, rank in zip(self._works, self._ranks, strict=True):
                self._awaited = (rank,)
                if timeout is None:
                    work.wait()
                else:
                    work.wait(timeout)
        except RuntimeError as error:
            self._outcome.put(error)
        else:
            self._outcome.put(None)

    def awaited(self) -> Sequence[int]:
        """The rank of the transfer that is waited for just now: if it goes before that ends, it is missed."""
        return self._awaited

    def ended(self, within: timedelta) -> bool:
        try:
            error = self._outcome.get(timeout=within.total_seconds())
        except queue.Empty:
            return False
        if error is not None:
            raise error
        return True


def _outwait(works: Sequence[Work], held: object) -> None:
    for work in works:
        with suppress(RuntimeError):
            work.wait()
    del held
