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
from typing import Literal, Protocol, get_args

from gradwire.cost.clock import Cost
from gradwire.errors import ConfigurationError
from gradwire.wire import Meter

Kind = Literal["all-reduce", "all-gather", "straight all-gather", "all-to-all", "broadcast", "exchange"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def sent_bytes(kind: Kind, nbytes: int, workers: int) -> int:
    """What rank 0 hands over to be sent in a collective of a payload, as the meter of the wire counts it."""
    meter = Meter()
    match kind:
        case "all-reduce":
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


def hops(kind: Kind, workers: int) -> int:
    """Messages that follow one another in a collective."""
    if workers == 1:
        return 0
    match kind:
        case "all-reduce":
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
            case "all-reduce":
                return 2 * (workers - 1) * nbytes / workers
        return sent_bytes(kind, nbytes, workers)


@dataclass(frozen=True)
class Line:
    """Measured times of a collective as a straight line over the bytes sent.

    Attributes:
        latency: Seconds of an empty one.
        inverse_bandwidth: Seconds a byte sent.
        work: Seconds of a core a byte sent.
        spread: Median relative distance of the measured times from the line.
    """

    latency: float
    inverse_bandwidth: float
    work: float = 0.0
    spread: float = 0.0


@dataclass(frozen=True)
class Measured:
    """A network as its group of workers saw it.

    Attributes:
        workers: How many.
        lines: A line for each kind of collective.
    """

    workers: int
    lines: Mapping[Kind, Line] = field(default_factory=dict)

    @property
    def spread(self) -> float:
        """The median of its lines'."""
        return statistics.median(line.spread for line in self.lines.values()) if self.lines else 0.0

    def cost(self, kind: Kind, nbytes: int) -> Cost:
        """What its line says."""
        line = self.lines[kind]
        sent = sent_bytes(kind, nbytes, self.workers)
        seconds = line.latency + line.inverse_bandwidth * sent
        return Cost(seconds, min(line.work * sent, seconds))


def fitted(points: Sequence[tuple[int, float]]) -> Line:
    """The line with the least relative distance through (bytes, seconds), from the medians of slopes.

    Latency is the smallest size's time less what its bytes take; the slope is the median of those from the smallest
    size to each other one, weighed by none.
    """
    points = sorted(points)
    (least, quickest), others = points[0], points[1:]
    slopes = sorted(max(seconds - quickest, 0.0) / (size - least) for size, seconds in others if size > least)
    slope = slopes[len(slopes) // 2] if slopes else 0.0
    latency = max(quickest - slope * least, 0.0)
    errors = sorted(abs(latency + slope * size - seconds) / seconds for size, seconds in points if seconds > 0)
    return Line(latency, slope, spread=errors[len(errors) // 2] if errors else 0.0)
