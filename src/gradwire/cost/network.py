"""What a collective costs on a network: latency and inverse bandwidth, of links as they are said to be or as measured.

The algorithms are those that ``torch.distributed`` runs and that :class:`gradwire.wire.Meter` counts: a ring for
all-reduce and all-gather, all transfers at once for all-to-all and the straight all-gather, a binomial tree for
broadcast. Costs in the model of latency and bandwidth: Thakur, Rabenseifner & Gropp 2005, doi:10.1177/1094342005051521.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, combinations
from typing import Literal, Protocol, get_args

import torch

from gradwire.cost.clock import Cost
from gradwire.errors import ConfigurationError
from gradwire.wire import Meter

Kind = Literal[
    "all-reduce", "half all-reduce", "all-gather", "straight all-gather", "all-to-all", "broadcast", "exchange"
]
"""Sums of two-byte numbers are of their own kind: backends without the instructions for them add them up slowly."""
KINDS: tuple[Kind, ...] = get_args(Kind)


def sent_bytes(kind: Kind, nbytes: int, workers: int) -> int:
    """What rank 0 hands over to be sent in a collective of a payload, as the meter of the wire counts it."""
    meter = Meter()
    match kind:
        case "all-reduce" | "half all-reduce":
            meter.all_reduce(nbytes, workers)
        case "all-gather" | "straight all-gather":
            meter.all_gather(nbytes, workers)
        case "all-to-all":
            meter.all_to_all(nbytes, workers)
        case "broadcast":
            meter.broadcast(nbytes, 0, workers)
        case "exchange":
            meter.exchange(nbytes)
    return meter.wire_bytes


def sum_of(dtype: torch.dtype) -> Kind:
    """The collective that adds up values of a type."""
    return "half all-reduce" if dtype.is_floating_point and dtype.itemsize == 2 else "all-reduce"


def hops(kind: Kind, workers: int) -> int:
    """Messages that follow one another in a collective."""
    if workers == 1:
        return 0
    match kind:
        case "all-reduce" | "half all-reduce":
            return 2 * (workers - 1)
        case "all-gather":
            return workers - 1
        case "broadcast":
            return math.ceil(math.log2(workers))
    return 1


class Network(Protocol):
    """What carries collectives among some workers.

    Attributes:
        workers: How many.
        spread: Median relative distance of what was measured from what this says; 0 for what is only said.
    """

    @property
    def workers(self) -> int:
        """How many."""
        ...

    @property
    def spread(self) -> float:
        """How sure it is."""
        ...

    def cost(self, kind: Kind, nbytes: int) -> Cost:
        """What a collective takes whose payload is ``nbytes`` on every worker."""
        ...


@dataclass(frozen=True)
class Level:
    """Some equals, each behind a link of its own: GPUs of a node, nodes of a site, sites.

    Attributes:
        count: How many there are in one of the level above.
        rate: Bits a second of each one's link, in each direction.
        latency: Seconds that a message takes through it.
    """

    count: int
    rate: float
    latency: float

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigurationError(f"count={self.count!r} is out of range; choose at least 1")
        if not self.rate > 0 or not self.latency >= 0:
            raise ConfigurationError(
                f"rate={self.rate!r}, latency={self.latency!r}: choose more than 0 bits a second and 0 s or more"
            )


@dataclass(frozen=True)
class Links:
    """Links that are what they are said to be, in levels, the innermost first.

    A collective takes as long as its busiest link. A ring crosses the link of a node once, however many workers are in
    it; what goes from each to each crosses it once for every worker in the node.

    Attributes:
        levels: The links of workers, of groups of workers, and so on.
        efficiency: The share of a rate that payload gets. Frames of 1500 bytes carry 1448 of 1514 as payload over TCP.
        work: Seconds of a core for a byte sent.
    """

    levels: tuple[Level, ...]
    efficiency: float = 0.956
    work: float = 0.0

    @property
    def workers(self) -> int:
        """The product of all counts."""
        return math.prod(level.count for level in self.levels)

    @property
    def spread(self) -> float:
        """None: nothing was measured."""
        return 0.0

    def cost(self, kind: Kind, nbytes: int) -> Cost:
        """The busiest link's bytes at its rate, and a latency a hop."""
        workers, inside, longest = self.workers, 1, 0.0
        latency = max((level.latency for level in self.levels if level.count > 1), default=0.0)
        for level in self.levels:
            if level.count > 1:
                crossing = self._crossing(kind, nbytes, inside)
                longest = max(longest, 8 * crossing / (self.efficiency * level.rate))
            inside *= level.count
        sent = sent_bytes(kind, nbytes, workers)
        return Cost(hops(kind, workers) * latency + longest, self.work * sent)

    def _crossing(self, kind: Kind, nbytes: int, inside: int) -> float:
        """Bytes that leave through the link of a group of ``inside`` workers."""
        workers = self.workers
        outside = workers - inside
        match kind:
            case "straight all-gather":
                return nbytes * inside * outside
            case "all-to-all":
                return nbytes / workers * inside * outside
            case "exchange":
                return nbytes * inside
            case "broadcast":
                return nbytes * math.ceil(math.log2(workers)) if workers > 1 else 0
            case "all-reduce" | "half all-reduce":
                return 2 * (workers - 1) * nbytes / workers
        return sent_bytes(kind, nbytes, workers)


@dataclass(frozen=True)
class Line:
    """Measured times of a collective over the bytes sent.

    Between measured sizes it is straight; beyond the largest it goes on as among the larger half. So it is no worse
    where small transfers are cheap: a shaped link lets its first millisecond through at once.

    Attributes:
        points: Bytes sent, ascending, and seconds, not descending.
        work: Seconds of a core a byte sent.
        spread: Median relative distance of the points from one straight line.
    """

    points: Sequence[tuple[int, float]]
    work: float = 0.0
    spread: float = 0.0

    @property
    def latency(self) -> float:
        """Seconds of the smallest."""
        return self.points[0][1]

    @property
    def inverse_bandwidth(self) -> float:
        """Seconds a byte among the larger half of the sizes: the median of all slopes there."""
        larger = self.points[len(self.points) // 2 :] if len(self.points) > 2 else self.points
        slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(larger, 2)]
        return statistics.median(slopes) if slopes else 0.0

    def seconds(self, sent: int) -> float:
        """Of a collective in which so many bytes are sent."""
        (least, quickest), (most, slowest) = self.points[0], self.points[-1]
        if sent <= least:
            return quickest
        if sent >= most:
            return slowest + self.inverse_bandwidth * (sent - most)
        after = next(index for index, (size, _) in enumerate(self.points) if size > sent)
        (before, lower), (beyond, upper) = self.points[after - 1], self.points[after]
        return lower + (upper - lower) * (sent - before) / (beyond - before)


@dataclass(frozen=True)
class Measured:
    """A network as its group of workers saw it.

    Attributes:
        workers: How many.
        lines: A line for each kind of collective.
        late: Seconds that a collective takes beyond that, since workers who have worked come to it one after another.
    """

    workers: int
    lines: Mapping[Kind, Line] = field(default_factory=dict)
    late: float = 0.0

    @property
    def spread(self) -> float:
        """The median of its lines'."""
        return statistics.median(line.spread for line in self.lines.values()) if self.lines else 0.0

    def cost(self, kind: Kind, nbytes: int) -> Cost:
        """What its line says."""
        line = self.lines[kind]
        sent = sent_bytes(kind, nbytes, self.workers)
        seconds = line.seconds(sent)
        return Cost(seconds + self.late, min(line.work * sent, seconds))


def line_through(points: Sequence[tuple[int, float]], work: float = 0.0) -> Line:
    """What (bytes, seconds) say, of which none is taken to be shorter than one of fewer bytes."""
    times = accumulate((seconds for _, seconds in sorted(points)), max)
    line = Line([(size, seconds) for (size, _), seconds in zip(sorted(points), times, strict=True)], work)
    slope = line.inverse_bandwidth
    spread = statistics.median(
        abs(line.latency + slope * (size - line.points[0][0]) - seconds) / seconds for size, seconds in line.points
    )
    return Line(line.points, work, spread)
