"""All workers of a world in one process: the wire's own scheduler for each, without a network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor

from gradwire.engine.configuration import Configuration
from gradwire.engine.engine import Engine
from gradwire.engine.unit import Unit
from gradwire.layout import Slot
from gradwire.surroundings import as_on_the_wire
from gradwire.wire import Scheduler, Transport, local_circles, local_transports


@dataclass(frozen=True)
class Step:
    """What one average took on rank 0.

    Attributes:
        written_bytes: Payloads that rank 0 wrote, all rounds together, but for what stayed in its node.
        sent_bytes: What rank 0 would have handed over to be sent.
        encode_seconds: Until the first payload was written.
        decode_seconds: From the first answer on, what is encoded again in later rounds included.
    """

    written_bytes: int
    sent_bytes: int
    encode_seconds: float
    decode_seconds: float


class LocalWorld:
    """A world of workers that average gradients of one layout, in turns in this process.

    Args:
        configuration: All choices.
        slots: Where the parameters lie in every gradient.
        workers: Number of workers.
        device: Where the gradients live.
        around: Put around each worker's transport.
        bucket_bytes: Parameters are averaged in buckets of at least so many bytes, the last ones first; in one of all
            if None, or where a method takes the whole gradient.

    Attributes:
        engines: Each worker's.
    """

    @as_on_the_wire()
    def __init__(
        self,
        configuration: Configuration,
        slots: Sequence[Slot],
        workers: int,
        device: torch.device = torch.device("cpu"),  # noqa: B008
        around: Callable[[Transport], Transport] = lambda transport: transport,
        bucket_bytes: int | None = None,
    ) -> None:
        nodes = None if configuration.inside is None else configuration.inside.of(range(workers))
        self.engines = [Engine(configuration, rank, workers, device, nodes) for rank in range(workers)]
        buckets = [tuple(slots)]
        if bucket_bytes is not None and not configuration.whole:
            buckets = _buckets(slots, bucket_bytes)
        self._buckets = [[_Bucket.of(engine, bucket) for bucket in buckets] for engine in self.engines]
        self._transports = local_transports(workers)
        lines: Sequence[Transport] = self._transports
        self._written = [self._transports[0]]
        if nodes is not None:
            lines, between = local_circles(self._transports, nodes.workers)
            self._written.append(between)
        self._schedulers = [
            Scheduler(around(transport), engine.meter, configuration.fuse_bytes, engine.later)
            for transport, engine in zip(lines, self.engines, strict=True)
        ]

    def average(self, gradients: Sequence[Tensor]) -> Step:
        """Averages ``float32`` flat gradients, one of each worker, in place."""
        written, before = self._written_bytes(), self.engines[0].meter.copy()
        for engine in self.engines:
            engine.before_step()
        ranks = zip(self.engines, self._buckets, self._schedulers, gradients, strict=True)
        with as_on_the_wire():
            for _ in zip_longest(*[_averaging(*rank) for rank in ranks]):
                pass
        for engine in self.engines:
            engine.after_step()
        after = self.engines[0].meter
        return Step(
            written_bytes=self._written_bytes() - written,
            sent_bytes=after.wire_bytes - before.wire_bytes,
            encode_seconds=after.seconds["encode"] - before.seconds["encode"],
            decode_seconds=after.seconds["decode"] - before.seconds["decode"],
        )

    def _written_bytes(self) -> int:
        return sum(each.written_bytes for each in self._written)


@dataclass(frozen=True)
class _Bucket:
    """Part of a gradient.

    Attributes:
        unit: Who handles it.
        start: Where it begins in the gradient.
    """

    unit: Unit
    start: int

    @classmethod
    def of(cls, engine: Engine, slots: Sequence[Slot]) -> _Bucket:
        start = min((slot.offset for slot in slots), default=0)
        return cls(engine.unit([replace(slot, offset=slot.offset - start) for slot in slots]), start)


def _buckets(slots: Sequence[Slot], least: int) -> list[tuple[Slot, ...]]:
    """Parameters that lie together, the last ones first, each time so many that they have some bytes."""
    found: list[tuple[Slot, ...]] = [()]
    for slot in reversed(slots):
        if 4 * sum(each.numel for each in found[-1]) >= least:
            found.append(())
        found[-1] = (slot, *found[-1])
    return found


def _averaging(engine: Engine, buckets: Sequence[_Bucket], scheduler: Scheduler, gradient: Tensor) -> Iterator[None]:
    """One rank's step; it yields where the rank would wait for the others."""
    for number, bucket in enumerate(buckets, start=1):
        own = gradient[bucket.start : bucket.start + bucket.unit.numel]
        last = number == len(buckets)
        synchronizations = engine.synchronizations(bucket.unit, own)
        engine.count(own.nbytes, last)
        yield from scheduler.run(synchronizations, partial(engine.after_decode, bucket.unit, own), last)
