"""The order of everything on the wire, decided by plain code from the order of submission alone.

Submitted synchronizations gather in an open group until their payload is worth a collective; then the group's first
round is issued and every older group moves on by one round, oldest first. With groups g0, g1, … of two rounds that is
the software pipeline r1(g0), r1(g1), r2(g0), r1(g2), r2(g1), …, so encoding overlaps sending, and the order is the
same on every rank because sizes and order of submission are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from gradwire.wire.fusion import Flight, goes_beside, issue
from gradwire.wire.meter import Meter
from gradwire.wire.requests import Request, Synchronization, lockstep
from gradwire.wire.transport import Transport


class Task:
    """Synchronizations that finish together, such as those of one bucket.

    Args:
        synchronizations: Fresh generators.
        on_done: Called once all of them have ended.
    """

    def __init__(self, synchronizations: Sequence[Synchronization], on_done: Callable[[], None]) -> None:
        self._rounds = lockstep(synchronizations)
        self._on_done = on_done
        self.requests: list[Request] = []

    def advance(self, answers: list[Tensor] | None) -> None:
        """Runs to the next round; ``requests`` is empty when there is none."""
        try:
            self.requests = next(self._rounds) if answers is None else self._rounds.send(answers)
        except StopIteration:
            self.requests = []
            self._on_done()

    def close(self) -> None:
        """Gives up."""
        self._rounds.close()


class Scheduler:
    """Fuses, orders and issues the rounds of submitted tasks.

    Args:
        transport: Where to send.
        meter: What to count with.
        fuse_bytes: Payload a group gathers before its first round is issued, in bytes.
    """

    def __init__(self, transport: Transport, meter: Meter, fuse_bytes: int) -> None:
        self._transport = transport
        self._meter = meter
        self._fuse_bytes = fuse_bytes
        self._open: list[Task] = []
        self._open_bytes = 0
        self._groups: deque[tuple[list[Task], Flight]] = deque()

    def submit(self, task: Task) -> None:
        """Encodes a task, and issues its group when that has gathered enough."""
        with self._meter.stage("encode"):
            task.advance(None)
        if not task.requests:
            return
        self._open.append(task)
        self._open_bytes += sum(each.payload.nbytes for each in task.requests if not goes_beside(each))
        if self._open_bytes >= self._fuse_bytes:
            self._close_group()

    def flush(self) -> None:
        """Issues what is left and sees everything to its end."""
        if self._open:
            self._close_group()
        while self._groups:
            self._advance_group()

    def abandon(self) -> None:
        """Drops everything that is under way."""
        for task in [*self._open, *(task for tasks, _ in self._groups for task in tasks)]:
            task.close()
        self._open, self._open_bytes = [], 0
        self._groups.clear()

    def _close_group(self) -> None:
        tasks, self._open, self._open_bytes = self._open, [], 0
        older = len(self._groups)
        self._launch(tasks)
        for _ in range(older):
            self._advance_group()

    def _launch(self, tasks: list[Task]) -> None:
        """Issues the current round of ``tasks``; they become the newest group."""
        requests = [request for task in tasks for request in task.requests]
        with self._meter.stage("wire"):
            flight = issue(requests, self._transport, self._meter)
        self._groups.append((tasks, flight))

    def _advance_group(self) -> None:
        """Lands the oldest group's round and launches its next one, if it has one."""
        tasks, flight = self._groups.popleft()
        with self._meter.stage("wire"):
            answers = flight()
        with self._meter.stage("decode"):
            for task in tasks:
                taken, answers = answers[: len(task.requests)], answers[len(task.requests) :]
                task.advance(taken)
        going_on = [task for task in tasks if task.requests]
        if going_on:
            self._launch(going_on)
