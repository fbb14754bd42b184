"""The time of one worker: threads that share its cores, and links that carry one transfer after another each.

Nothing here is fitted. Work is seconds of one core; what is under way at the same time gets equal shares of the cores,
none more than it can use, until the next of it is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Row = Literal["backward", "encode", "wire", "decode"]


@dataclass(frozen=True)
class Cost:
    """What a transfer takes.

    Attributes:
        seconds: With a core to itself, from its beginning to its end.
        work: Seconds of a core in it; at most ``seconds``, if a single thread does it.
    """

    seconds: float
    work: float = 0.0


@dataclass(frozen=True)
class Work:
    """Something that took time.

    Attributes:
        row: What it was.
        unit: For which bucket, from 0; None for what several share.
        round: Which round of it, from 0.
        start: When, in seconds since the backward pass began.
        stop: Until when.
    """

    row: Row
    unit: int | None
    round: int
    start: float
    stop: float


@dataclass(eq=False)
class Transfer:
    """A transfer under way.

    Attributes:
        cost: What it takes.
        left: The share of it that is still to come.
        place: Bucket and round.
        started: When its first byte left; None while others are before it.
    """

    cost: Cost
    place: tuple[int | None, int]
    left: float = 1.0
    started: float | None = None


@dataclass(eq=False)
class Clock:
    """One worker's time.

    Attributes:
        cores: Cores that the worker has: less than 1 where workers share one.
        factor: How many times as long everything but backward takes as is said of it.
        now: Seconds since the backward pass began.
        done: All work so far, in order of its end.
        waited: Seconds that the wire's thread waited for transfers.
    """

    cores: float = float("inf")
    factor: float = 1.0
    now: float = 0.0
    done: list[Work] = field(default_factory=list)
    waited: float = 0.0
    _backward: deque[tuple[int, float]] = field(default_factory=deque)
    _began: float = 0.0
    _computing: float = 0.0
    _links: dict[str, deque[Transfer]] = field(default_factory=dict)

    def backward(self, works: Sequence[float]) -> None:
        """Begins a backward pass: seconds of a core until each bucket is ready."""
        self._backward = deque(enumerate(works))
        self._began = self.now

    def until_ready(self, bucket: int) -> None:
        """Waits for a bucket."""
        self._run(lambda: not self._backward or self._backward[0][0] > bucket)

    def compute(self, row: Row, unit: int | None, number: int, seconds: float) -> None:
        """Keeps the wire's thread busy."""
        if not seconds:
            return
        start, self._computing = self.now, self.factor * seconds
        self._run(lambda: self._computing <= 0)
        self.done.append(Work(row, unit, number, start, self.now))

    def send(self, cost: Cost, place: tuple[int | None, int], link: str = "all") -> Transfer:
        """Puts a transfer behind all others of a link."""
        transfer = Transfer(Cost(self.factor * cost.seconds, self.factor * cost.work), place)
        self._links.setdefault(link, deque()).append(transfer)
        return transfer

    def until_there(self, transfer: Transfer) -> None:
        """Waits for a transfer."""
        start = self.now
        self._run(lambda: transfer.left <= 0)
        self.waited += self.now - start

    def _run(self, enough: Callable[[], bool]) -> None:
        """Lets time pass, from one end of something to the next."""
        self._settle()
        while not enough():
            self._pass()
            self._settle()

    def _pass(self) -> None:
        """Until the next of what is under way is done."""
        transfers = [link[0] for link in self._links.values() if link]
        carried = [each.cost.work / each.cost.seconds for each in transfers]
        wanted = [float(bool(self._backward)), float(self._computing > 0), *(min(each, 1.0) for each in carried)]
        backward, computing, *carrying = shared(wanted, self.cores)
        paces = [
            (given / asked if asked else 1.0) / transfer.cost.seconds
            for transfer, given, asked in zip(transfers, carrying, carried, strict=True)
        ]
        ends = [self._backward[0][1] / backward] if self._backward else []
        ends += [self._computing / computing] if self._computing > 0 else []
        ends += [transfer.left / pace for transfer, pace in zip(transfers, paces, strict=True)]
        span = min(ends)
        self.now += span
        if self._backward:
            bucket, left = self._backward[0]
            self._backward[0] = bucket, _less(left, span * backward)
        if self._computing > 0:
            self._computing = _less(self._computing, span * computing)
        for transfer, pace in zip(transfers, paces, strict=True):
            transfer.left = _less(transfer.left, span * pace)

    def _settle(self) -> None:
        """Notes what is done, and begins what comes after it."""
        while self._backward and self._backward[0][1] <= 0:
            bucket, _ = self._backward.popleft()
            self.done.append(Work("backward", bucket, 0, self._began, self.now))
            self._began = self.now
        for link in self._links.values():
            while link:
                first = link[0]
                if first.started is None:
                    first.started = self.now
                if first.left > 0 and first.cost.seconds > 0:
                    break
                first.left = 0.0
                link.popleft()
                self.done.append(Work("wire", *first.place, first.started, self.now))


def shared(wanted: Sequence[float], cores: float) -> list[float]:
    """Equal shares of some cores, none larger than what is wanted of it."""
    given = [0.0] * len(wanted)
    left, hungry = cores, sorted((want, index) for index, want in enumerate(wanted) if want > 0)
    while hungry:
        want, index = hungry.pop(0)
        given[index] = min(want, left / (len(hungry) + 1))
        left -= given[index]
    return given


def _less(left: float, done: float) -> float:
    """What is left; nothing where only rounding is."""
    return left - done if left - done > 1e-12 * max(left, done) else 0.0
