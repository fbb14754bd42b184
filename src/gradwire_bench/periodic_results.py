"""What the trainings and timings of ``gradwire bench periodic`` came to, and how they compare."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from gradwire_bench.periodic_plans import FULL, Run

VOLUME_TOLERANCE = 0.01
"""Loss above full communication's, as a share of it, that still counts as a match."""

SILENT_LIMIT = 0.02
AVERAGE_LIMIT = 1.3
HIDDEN_LEAST = 0.8


@dataclass
class Outcome:
    """What one training came to.

    Attributes:
        run: The training.
        workers: Worker processes.
        steps_done: Steps so far.
        loss: Cross entropy in nats on the test samples.
        accuracy: Share of them answered rightly.
        dense_bytes: Bytes a worker and step that a dense ring all-reduce of the gradient sends.
        metered_bytes: Bytes a worker and step handed over to be sent, by gradwire's meter; mean over workers.
        interface_bytes: Bytes a worker and step that its network interface sent, headers included.
        seconds: Training time.
        optimizer_seconds: Part of it spent in optimizer steps, waiting for averages included, and at the end; mean over
            workers.
        ending_seconds: Part of that after the last step, for averages still on their way; mean over workers.
        parameters: Digest of the model's bits at the end.
        error: Why there is no result.
    """

    run: Run
    workers: int
    steps_done: int = 0
    loss: float | None = None
    accuracy: float | None = None
    dense_bytes: float | None = None
    metered_bytes: float | None = None
    interface_bytes: float | None = None
    seconds: float | None = None
    optimizer_seconds: float | None = None
    ending_seconds: float | None = None
    parameters: str | None = None
    error: str | None = None

    @property
    def share(self) -> float | None:
        """Bytes sent as a share of full communication's."""
        if self.metered_bytes is None or not self.dense_bytes:
            return None
        return self.metered_bytes / self.dense_bytes


@dataclass(frozen=True)
class Spread:
    """Mean and range over the seeds."""

    mean: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(statistics.fmean(values), min(values), max(values))


@dataclass
class Row:
    """One plan's trainings over all seeds.

    Attributes:
        label: The plan.
        workers: Worker processes.
        seeds: Trainings that have ended well.
        share: Bytes by the meter as a share of full communication's.
        bytes: Bytes a worker and step by the meter.
        loss: In nats.
        accuracy: Share answered rightly.
        seconds: Training time.
        within: Whether the mean loss is at most the largest that full communication ended with under some seed.
        gap: The mean over seeds of the loss above full communication's under the same seed.
        error: Why there is no result.
    """

    label: str
    workers: int
    seeds: int = 0
    share: float | None = None
    bytes: float | None = None
    loss: Spread | None = None
    accuracy: Spread | None = None
    seconds: float | None = None
    within: bool | None = None
    gap: float | None = None
    error: str | None = None


@dataclass
class Speedup:
    """The loss that a number of workers reaches.

    Attributes:
        workers: Number of workers, M.
        losses: The loss by the number of steps of each worker, K.
        target: The lowest loss that every number of workers reaches.
        steps_to_target: The steps of each worker to it.
        times: How many times fewer these are than one worker's; M if the speed-up is linear.
    """

    workers: int
    losses: dict[int, Spread]
    target: float
    steps_to_target: float | None = None
    times: float | None = None


@dataclass
class Silence:
    """What an attached averager costs a step in which nothing is sent.

    Attributes:
        optimizer: The optimizer.
        alone: CPU seconds of a step of the bare optimizer.
        attached: CPU seconds of a step with the averager attached.
    """

    optimizer: str
    alone: float
    attached: float

    @property
    def overhead(self) -> float:
        """The difference as a share of the bare step."""
        return self.attached / self.alone - 1


@dataclass
class Average:
    """How long one average takes.

    Attributes:
        method: What is sent.
        workers: How many average.
        seconds: Each average's time, of its slowest worker.
        metered_bytes: Bytes a worker handed over for one average.
        link_seconds: What the link alone needs for them; ``None`` on plain loopback.
        error: Why there is no result.
    """

    method: str
    workers: int
    seconds: list[float] = field(default_factory=list)
    metered_bytes: float | None = None
    link_seconds: float | None = None
    error: str | None = None

    @property
    def ratio(self) -> float | None:
        """The median time as a multiple of the link's."""
        if not (self.seconds and self.link_seconds):
            return None
        return statistics.median(self.seconds) / self.link_seconds


@dataclass
class Stream:
    """How much waiting a delay hides.

    Attributes:
        plan: How it averages.
        seconds: Training time.
        waited: Seconds a worker waited in optimizer steps beyond what the same steps take when nothing is sent.
        ending: Part of that after the last step, which nothing can hide.
        hidden: Share of the waiting without delay that is gone.
    """

    plan: str
    seconds: float
    waited: float
    ending: float = 0.0
    hidden: float | None = None


def summary(outcomes: Sequence[Outcome]) -> list[Row]:
    """One row for each plan and number of workers, over the seeds, compared with full communication."""
    rows = []
    for workers, plan in dict.fromkeys((each.workers, each.run.plan) for each in outcomes):
        mine = [each for each in outcomes if each.workers == workers and each.run.plan == plan]
        row = Row(plan.label, workers, error=next((each.error for each in mine if each.error), None))
        rows.append(row)
        done = [each for each in mine if each.loss is not None]
        if not done:
            continue
        row.seeds = len(done)
        row.loss = Spread.of(_values(done, "loss"))
        row.accuracy = Spread.of(_values(done, "accuracy"))
        row.seconds = statistics.fmean(_values(done, "seconds"))
        row.share, row.bytes = (
            statistics.fmean(_values(done, "share")),
            statistics.fmean(_values(done, "metered_bytes")),
        )
        full = {
            each.run.seed: each.loss
            for each in outcomes
            if each.workers == workers and each.run.plan == FULL and each.loss is not None
        }
        if plan != FULL and full:
            row.within = row.loss.mean <= max(full.values())
            gaps = [(each.loss or 0.0) - full[each.run.seed] for each in done if each.run.seed in full]
            row.gap = statistics.fmean(gaps) if gaps else None
    return rows


def least_volume(rows: Sequence[Row]) -> Row | None:
    """The plan with the fewest bytes whose mean loss is close to full communication's; ``None`` if no plan's is."""
    full = next((row.loss.mean for row in rows if row.label == FULL.label and row.loss is not None), None)
    if full is None:
        return None
    close = [row for row in rows if row.loss is not None and row.loss.mean <= (1 + VOLUME_TOLERANCE) * full]
    return min(close, key=lambda row: row.share or 0.0, default=None)


def speedups(outcomes: Sequence[Outcome]) -> list[Speedup]:
    """Loss against steps for each number of workers, and how many steps each needs to a loss that all reach.

    That loss is the lowest of the number of workers that ends highest, for the theorem is about many steps.
    """
    curves: dict[int, dict[int, Spread]] = {}
    for workers in dict.fromkeys(each.workers for each in outcomes):
        mine = [each for each in outcomes if each.workers == workers and each.loss is not None]
        by_steps = {
            steps: Spread.of([each.loss or 0.0 for each in mine if each.run.steps == steps])
            for steps in dict.fromkeys(each.run.steps for each in mine)
        }
        if by_steps:
            curves[workers] = by_steps
    if not curves:
        return []
    target = max(min(spread.mean for spread in curve.values()) for curve in curves.values())
    rows = [
        Speedup(workers, curve, target, steps_to(target, [(steps, spread.mean) for steps, spread in curve.items()]))
        for workers, curve in curves.items()
    ]
    alone = rows[0]
    for row in rows:
        if alone.steps_to_target and row.steps_to_target:
            row.times = alone.steps_to_target / row.steps_to_target * alone.workers
    return rows


def steps_to(target: float, curve: Sequence[tuple[int, float]]) -> float | None:
    """Steps at which a falling curve of (steps, loss) reaches a loss, between its points on logarithmic steps.

    ``None`` if it lies outside of them.
    """
    for (before, high), (after, low) in pairwise(curve):
        if high >= target >= low and high > low:
            return float(before * (after / before) ** ((high - target) / (high - low)))
    return None


def streams(outcomes: Sequence[Outcome]) -> list[Stream]:
    """The waiting of each training beyond the first one's, in which nothing is sent."""
    silent, *sending = outcomes
    base = silent.optimizer_seconds or 0.0
    rows = [Stream(silent.run.plan.label, silent.seconds or 0.0, 0.0)]
    waited: dict[int, float] = {}
    for each in sending:
        waiting = (each.optimizer_seconds or 0.0) - base
        row = Stream(each.run.plan.label, each.seconds or 0.0, waiting, each.ending_seconds or 0.0)
        fragments = each.run.plan.fragments
        if each.run.plan.delay == 0:
            waited[fragments] = row.waited
        elif waited.get(fragments):
            row.hidden = 1 - row.waited / waited[fragments]
        rows.append(row)
    return rows


def _values(outcomes: Sequence[Outcome], name: str) -> list[float]:
    return [getattr(each, name) or 0.0 for each in outcomes]
