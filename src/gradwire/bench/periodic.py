"""``gradwire bench periodic``: local steps with a compressed average now and then, against an average every step."""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from gradwire import lab
from gradwire.bench.data import DataSource
from gradwire.bench.worker import ended_early
from gradwire.bench.workloads import Workload
from gradwire.errors import LabError

Optimizer = Literal["sgd", "adamw"]

CLAIM_WORKERS = (4, 8)
SPEEDUP_WORKERS = (1, 2, 4, 8)
SPEEDUP_PARTS = (8, 4, 2, 1)
"""Of the steps, the trainings have these parts."""
SPEEDUP_RATE = 0.75
"""Learning rate at 8 workers and the most steps, as a multiple of the workload's own."""

VOLUME_WORKERS = 4
VOLUME_RATE = 0.01
"""Learning rate of AdamW."""
VOLUME_TIMES = 2
"""Its trainings are longer by this factor, as long periods need."""
VOLUME_TOLERANCE = 0.01
"""Loss above full communication's, as a share of it, that still counts as a match."""

STREAM_WORKERS = 2
STREAM_STEPS = 96
STREAM_EVERY, STREAM_DELAY = 16, 12

SILENT_STEPS, SILENT_ROUNDS = 100, 21
AVERAGE_REPEATS = 3
SILENT_LIMIT = 0.02
AVERAGE_LIMIT = 1.3
HIDDEN_LEAST = 0.8

TEST_SAMPLES, LARGE_TEST_SAMPLES = 4_000, 100
"""Test samples that a small and a large model are judged by; the large ones are there to be timed."""

BATCH = {"image": 16, "language": 8}
"""Samples a worker and step."""


@dataclass(frozen=True)
class Plan:
    """When to average what, and how.

    Attributes:
        label: For tables and plots.
        every: Local steps from one average of parameter changes to the next; 0 averages the gradient of every step.
        method: ``name:option=value,...`` of what is sent.
        outer_rate: Learning rate of the outer Nesterov SGD; 0 takes the average as it is.
        outer_momentum: Its momentum.
        feedback: Decay of the residual memory; 0 for the memory that the method brings.
        fragments: Pieces of the model that are averaged in turn.
        delay: Local steps from sending an average off to taking it.
    """

    label: str
    every: int
    method: str = "dense"
    outer_rate: float = 0.0
    outer_momentum: float = 0.9
    feedback: float = 0.0
    fragments: int = 1
    delay: int = 0


FULL = Plan("every step, fp32", 0)

CLAIM = (
    FULL,
    Plan("PQASGD 2 bits, p=2", 2, "qsgd:bits=2"),
    Plan("PQASGD 4 bits, p=4", 4, "qsgd:bits=4"),
    Plan("PQASGD 8 bits, p=5", 5, "qsgd:bits=8"),
)

SPEEDUP = Plan("PQASGD 4 bits, p=4", 4, "qsgd:bits=4")

VOLUME = (
    FULL,
    Plan("PQASGD 4 bits, p=4", 4, "qsgd:bits=4"),
    Plan("PQASGD 4 bits, p=16", 16, "qsgd:bits=4"),
    Plan("PQASGD 4 bits, p=60", 60, "qsgd:bits=4"),
    Plan("DiLoCo fp32, p=20", 20, outer_rate=0.7),
    Plan("DiLoCo 4 bits, p=20", 20, "qsgd:bits=4", outer_rate=0.7),
    Plan("DiLoCo 4 bits, p=60", 60, "qsgd:bits=4", outer_rate=0.7),
    Plan("SparseLoCo 2 %, p=20", 20, "topk:ratio=0.02,values=qsgd:2", 0.7, 0.0, feedback=0.95),
    Plan("SparseLoCo 5 %, p=20", 20, "topk:ratio=0.05,values=qsgd:2", 0.7, 0.0, feedback=0.95),
    Plan("SparseLoCo 5 %, p=60", 60, "topk:ratio=0.05,values=qsgd:2", 0.7, 0.0, feedback=0.95),
)

AVERAGED = ("dense", "qsgd:bits=8", "qsgd:bits=4", "qsgd:bits=2", "topk:ratio=0.02")
"""Methods whose average is timed."""


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        plan: How it averages.
        seed: Seed of the model's start and of the order of the samples.
        steps: Local steps of each worker.
        learning_rate: At its peak.
    """

    plan: Plan
    seed: int
    steps: int
    learning_rate: float


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
        optimizer_seconds: Part of it spent in optimizer steps, waiting for averages included; mean over workers.
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
        seconds: Each average's time, of its slowest worker.
        metered_bytes: Bytes a worker handed over for one average.
        link_seconds: What the link alone needs for them; ``None`` on plain loopback.
        error: Why there is no result.
    """

    method: str
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
        hidden: Share of the waiting without delay that is gone.
    """

    plan: str
    seconds: float
    waited: float
    hidden: float | None = None


def claim_runs(workload: Workload, workers: int, seeds: Sequence[int], worker_steps: int) -> list[Run]:
    """Full communication and three PQASGD recipes at 3 to 5 % of its bytes, as many samples at any number of workers.

    The seed comes first, so that what is compared ran side by side.
    """
    steps = worker_steps // workers
    return [Run(plan, seed, steps, workload.learning_rate) for seed in seeds for plan in CLAIM]


def speedup_runs(workload: Workload, workers: int, seeds: Sequence[int], worker_steps: int) -> list[Run]:
    """PQASGD at several numbers of steps, its learning rate in proportion to sqrt(M / K) as the theorem has it.

    M workers at a given M K then take steps in proportion to M, so K falls as 1 / M if the speed-up is linear.
    """
    widest = max(SPEEDUP_WORKERS)
    scale = SPEEDUP_RATE * workload.learning_rate * (worker_steps / widest / widest) ** 0.5
    runs = []
    for seed in seeds:
        for part in SPEEDUP_PARTS:
            steps = worker_steps // part // workers
            runs.append(Run(SPEEDUP, seed, steps, scale * (workers / steps) ** 0.5))
    return runs


def volume_runs(seeds: Sequence[int], worker_steps: int) -> list[Run]:
    """Full communication, and recipes that send ever less; AdamW."""
    steps = VOLUME_TIMES * worker_steps // VOLUME_WORKERS
    return [Run(plan, seed, steps, VOLUME_RATE) for seed in seeds for plan in VOLUME]


def stream_runs(workload: Workload, seed: int) -> list[Run]:
    """The same averages: none at all, waited for, and merged most of a period later."""
    steps = STREAM_STEPS
    plans = (
        Plan("nothing sent", steps + 1),
        Plan(f"p={STREAM_EVERY}, waited for", STREAM_EVERY),
        Plan(f"p={STREAM_EVERY}, delay {STREAM_DELAY}", STREAM_EVERY, delay=STREAM_DELAY),
        Plan(f"p={STREAM_EVERY}, 4 fragments, waited for", STREAM_EVERY, fragments=4),
        Plan(
            f"p={STREAM_EVERY}, 4 fragments, delay {STREAM_DELAY}",
            STREAM_EVERY,
            fragments=4,
            delay=STREAM_DELAY,
        ),
    )
    return [Run(plan, seed, steps, workload.learning_rate) for plan in plans]


def train(
    workload: Workload,
    source: DataSource,
    workers: int,
    rate: str | None,
    runs: Sequence[Run],
    *,
    optimizer: Optimizer = "sgd",
    large: bool = False,
    on_progress: Callable[[list[Outcome]], object],
) -> list[Outcome]:
    """Does trainings one after another in the same worker processes.

    Args:
        workload: The model.
        source: The data that it learns from.
        workers: Number of worker processes.
        rate: Rate of each worker's link such as ``"100mbit"``; ``None`` for plain loopback.
        runs: The trainings.
        optimizer: Of the local steps.
        large: Train the workload's own model; its small one otherwise.
        on_progress: Called with the outcomes so far from time to time.

    Returns:
        An outcome for every training; one that failed says why.
    """
    outcomes = [Outcome(run, workers) for run in runs]
    job = {
        "kind": "train",
        "workload": workload.name,
        "data": source.name,
        "data_directory": str(source.directory) if source.directory else None,
        "batch": BATCH[workload.name],
        "optimizer": optimizer,
        "large": large,
        "test_samples": LARGE_TEST_SAMPLES if large else TEST_SAMPLES,
        "shaped": rate is not None,
        "runs": [dataclasses.asdict(run) for run in runs],
    }

    def take(event: dict[str, Any]) -> None:
        outcome = outcomes[event.pop("row")]
        match event.pop("event"):
            case "step":
                outcome.steps_done = event["step"]
            case "failed":
                outcome.error = outcome.error or event["reason"]
            case "result":
                outcome.steps_done = outcome.run.steps
                for name, value in event.items():
                    setattr(outcome, name, value)
        on_progress(outcomes)

    ended = _work(job, workers, rate, take)
    for outcome in outcomes:
        if ended and outcome.loss is None and outcome.error is None:
            outcome.error = ended
    return outcomes


def silence() -> list[Silence]:
    """Times optimizer steps with and without an averager that never sends, in turn, in two processes.

    CPU time; the median over rounds counts.
    """
    found: list[Silence] = []

    def take(event: dict[str, Any]) -> None:
        found.append(Silence(event["optimizer"], event["alone"], event["attached"]))

    job = {"kind": "silence", "steps": SILENT_STEPS, "rounds": SILENT_ROUNDS}
    _work(job, 2, None, take, must_succeed=True)
    return found


def averages(
    shapes: str, workers: int, rate: str | None, on_progress: Callable[[list[Average]], object]
) -> list[Average]:
    """Times the average of a model-shaped change of parameters, from asking for it to having it.

    Args:
        shapes: Whose shapes the model has, of ``gradwire.bench.shapes``.
        workers: Number of worker processes.
        rate: Rate of each worker's link.
        on_progress: Called with the rows so far.
    """
    rows = [Average(method) for method in AVERAGED]
    bits_per_second = None if rate is None else lab.parse_rate(rate)

    def take(event: dict[str, Any]) -> None:
        row = rows[event["row"]]
        if event["event"] == "failed":
            row.error = row.error or event["reason"]
        else:
            row.seconds, row.metered_bytes = event["seconds"], event["metered_bytes"]
            if bits_per_second is not None:
                row.link_seconds = 8 * event["metered_bytes"] / bits_per_second
        on_progress(rows)

    job = {"kind": "average", "shapes": shapes, "repeats": AVERAGE_REPEATS, "methods": list(AVERAGED)}
    ended = _work(job, workers, rate, take)
    for row in rows:
        if ended and not row.seconds and row.error is None:
            row.error = ended
    return rows


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
        row = Stream(each.run.plan.label, each.seconds or 0.0, (each.optimizer_seconds or 0.0) - base)
        fragments = each.run.plan.fragments
        if each.run.plan.delay == 0:
            waited[fragments] = row.waited
        elif waited.get(fragments):
            row.hidden = 1 - row.waited / waited[fragments]
        rows.append(row)
    return rows


def _values(outcomes: Sequence[Outcome], name: str) -> list[float]:
    return [getattr(each, name) or 0.0 for each in outcomes]


def _work(
    job: dict[str, Any],
    workers: int,
    rate: str | None,
    take: Callable[[dict[str, Any]], None],
    *,
    must_succeed: bool = False,
) -> str | None:
    """Runs a job in worker processes; returns why it ended early, if it did after something was told."""
    told = False

    def on_line(rank: int, line: str) -> None:
        nonlocal told
        if line.startswith("{"):
            told = True
            take(json.loads(line))

    try:
        with lab.Lab(workers=workers, rate=rate) as network:
            network.run([sys.executable, "-m", "gradwire.bench.periodic_worker", json.dumps(job)], on_line=on_line)
    except LabError as error:
        if must_succeed or not told:
            raise
        return ended_early(error)
    return None
