"""The order of everything on the wire, decided by plain code from the order of submission alone.

Submitted synchronizations gather in an open group until their payload is worth a collective; then the group's first
round is issued, and groups whose round was issued two groups ago move on by one round, oldest first. With groups g0,
g1, … of two rounds that is the software pipeline r1(g0), r1(g1), r1(g2), r2(g0), r1(g3), r2(g1), …, so encoding
overlaps sending, and the order is the same on every rank because sizes and order of submission are.

Nothing small waits behind something large. On a slow link a small all-reduce is a chain of 2 (n - 1) messages, each of
which queues behind whatever is on its way: next to a bucket's all-to-all at 100 Mbit/s 25 kB take 150 to 450 ms, for
which the bucket's next round would wait. So averages that may be late wait for a group that has an average of their
dtype anyway and share its collective. Otherwise they become groups of their own, when they are worth a collective and
when the step ends; nothing waits for these before its end. There they come before the last other group: what waited for
both is finished while that one is on its way.

Nothing here waits without saying so first (:meth:`Scheduler.run`): one thread may thus run the schedulers of several
ranks in turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.deferred import Later
from gradwire.errors import WireError
from gradwire.wire.fusion import Flight, goes_beside, issue
from gradwire.wire.meter import Meter, Stage
from gradwire.wire.requests import AllReduceMean, Request, Synchronization, lockstep
from gradwire.wire.transport import Transport

AHEAD = 2
"""Rounds that may be on their way while the next group is encoded: with fewer the network idles then, with more the end
of a step, which nothing hides, becomes longer. With 2 instead of 1 a step of ``acpsgd`` at 100 Mbit/s, 4 workers on two
cores, is 60 to 63 times as fast as DDP's instead of 53 to 54; 3 gain no more (2026-11-21)."""

_UNNAMED = nullcontext()
"""Of a stage that no profile is made of."""


class Task:
    """A synchronization at work.

    Args:
        synchronization: A fresh generator.
        on_done: Called once it has ended.

    Attributes:
        requests: What it asks for now.
        late: Whether all of that may come at the end of the step.
        averaged: The circles and dtypes of averages among it that others may share the collective of.
        nbytes: Its payload, without what goes beside others.
    """

    def __init__(self, synchronization: Synchronization, on_done: Callable[[], None]) -> None:
        self._rounds = lockstep([synchronization])
        self._on_done = on_done
        self._ask([])

    def advance(self, answers: list[Tensor] | None) -> None:
        """Runs to the next round; ``requests`` is empty when there is none."""
        try:
            self._ask(next(self._rounds) if answers is None else self._rounds.send(answers))
        except StopIteration:
            self._ask([])
            self._on_done()

    def _ask(self, requests: list[Request]) -> None:
        self.requests = requests
        self.late = all(isinstance(request, AllReduceMean) and request.late for request in requests)
        self.averaged = {
            (request.among, request.payload.dtype)
            for request in requests
            if isinstance(request, AllReduceMean) and not request.beside
        }
        self.nbytes = sum(request.payload.nbytes for request in requests if not goes_beside(request))

    def close(self) -> None:
        """Gives up."""
        self._rounds.close()


@dataclass(frozen=True, eq=False)
class _Group:
    """Tasks that share their rounds.

    Attributes:
        tasks: What they are.
        round: The round that is on its way, counted from 0.
        turn: How many groups had been launched before it was issued.
        flight: Lands it.
    """

    tasks: list[Task]
    round: int
    turn: int
    flight: Flight


class Scheduler:
    """Fuses, orders and issues the rounds of submitted synchronizations.

    Args:
        transport: Where to send.
        meter: What to count with.
        fuse_bytes: Payload a group gathers before its first round is issued, in bytes.
        later: What the host is told of a step in the next; of its own if None.
    """

    def __init__(self, transport: Transport, meter: Meter, fuse_bytes: int, later: Later | None = None) -> None:
        self._transport = transport
        self._meter = meter
        self._fuse_bytes = fuse_bytes
        self._open: list[Task] = []
        self._late: list[Task] = []
        self._groups: deque[_Group] = deque()
        self._late_groups: deque[_Group] = deque()
        self._later = later or Later()
        self._begun = False
        self._step = 0
        self._turn = 0

    def submit(
        self, synchronizations: Sequence[Synchronization], on_done: Callable[[], None], last: bool = False
    ) -> None:
        """Encodes what finishes together, such as a bucket, and issues its group when that has gathered enough.

        Args:
            synchronizations: Fresh generators.
            on_done: Called once all of them have ended.
            last: Whether they are a step's last; then everything is issued and seen to its end.
        """
        for _ in self.run(synchronizations, on_done, last):
            pass

    def run(
        self, synchronizations: Sequence[Synchronization], on_done: Callable[[], None], last: bool = False
    ) -> Iterator[None]:
        """Does what :meth:`submit` does, and yields whenever it is about to wait for a round."""
        if not self._begun:
            self.settle()
            self._begun = True
        self._meter.edge = None
        self._encode(synchronizations, on_done)
        averaged = {each for task in self._open for each in task.averaged}
        self._open += [task for task in self._late if task.averaged <= averaged]
        self._late = [task for task in self._late if not task.averaged <= averaged]
        if self._worth_it(self._late, last):
            tasks, self._late = self._late, []
            self._launch(self._late_groups, tasks, 0)
        if self._worth_it(self._open, last):
            tasks, self._open = self._open, []
            self._launch(self._groups, tasks, 0)
            while self._groups[0].turn + AHEAD <= self._turn:
                yield from self._waiting()
                self._advance(self._groups)
            self._turn += 1
        if last:
            while len(self._groups) > 1:
                yield from self._waiting()
                self._advance(self._groups)
            for groups in (self._late_groups, self._groups):
                while groups:
                    yield from self._waiting()
                    self._advance(groups)
            self._later.send()
            self._begun = False
            self._step += 1

    def _waiting(self) -> Iterator[None]:
        """Says that a round is waited for; what others do meanwhile on the same device is no stage of this one's."""
        yield
        self._meter.edge = None

    def settle(self) -> None:
        """Tells the host what devices have computed in the last step; does nothing in the middle of one.

        Raises:
            PayloadError: If what came in that step was not what any encoder writes.
        """
        if not self._begun:
            self._meter.settle()
            self._later.settle()

    def abandon(self) -> None:
        """Drops everything that is under way."""
        under_way = [task for group in [*self._groups, *self._late_groups] for task in group.tasks]
        for task in [*self._open, *self._late, *under_way]:
            task.close()
        self._open, self._late = [], []
        self._groups.clear()
        self._late_groups.clear()

    def _encode(self, synchronizations: Sequence[Synchronization], on_done: Callable[[], None]) -> None:
        """Runs synchronizations to their first requests."""
        left = len(synchronizations)

        def one_done() -> None:
            nonlocal left
            left -= 1
            if not left:
                on_done()

        if not synchronizations:
            on_done()
        with self._stage("encode", 0):
            for synchronization in synchronizations:
                task = Task(synchronization, one_done)
                task.advance(None)
                if task.requests:
                    (self._late if task.late else self._open).append(task)

    def _worth_it(self, tasks: Sequence[Task], last: bool) -> bool:
        """Whether to issue the first round of ``tasks`` now."""
        return sum(task.nbytes for task in tasks) >= self._fuse_bytes or (last and bool(tasks))

    def _launch(self, groups: deque[_Group], tasks: list[Task], number: int) -> None:
        """Issues round ``number`` of ``tasks``; they become the newest of ``groups``."""
        requests = [request for task in tasks for request in task.requests]
        with self._stage("wire", number):
            flight = issue(requests, self._transport, self._meter)
        groups.append(_Group(tasks, number, self._turn, flight))

    def _advance(self, groups: deque[_Group]) -> None:
        """Lands the oldest group's round and launches its next one, if it has one."""
        group = groups.popleft()
        with self._stage("wire", group.round):
            answers = group.flight()
        with self._stage("decode", group.round):
            for task in group.tasks:
                taken, answers = answers[: len(task.requests)], answers[len(task.requests) :]
                task.advance(taken)
        going_on = [task for task in group.tasks if task.requests]
        if going_on:
            self._launch(groups, going_on, group.round + 1)

    @contextmanager
    def _stage(self, stage: Stage, number: int) -> Iterator[None]:
        """Meters a stage, names it in a profile, and adds to an error where it happened."""
        # What records a range costs microseconds even where nothing is recorded.
        profiled = torch.autograd.profiler._is_profiler_enabled
        named = torch.profiler.record_function(f"gradwire::{stage}") if profiled else _UNNAMED
        try:
            with self._meter.stage(stage), named, self._later.collecting():
                yield
        except WireError as error:
            error.step, error.round = self._step, number
            raise
        except Exception as error:
            error.add_note(f"while gradwire averaged gradients: {stage}, step {self._step}, round {number}")
            raise
