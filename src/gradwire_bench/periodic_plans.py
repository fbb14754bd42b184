"""Which trainings ``gradwire bench periodic`` compares: what is averaged when, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire_bench.workloads import Workload

CLAIM_WORKERS = (4, 8)
SPEEDUP_WORKERS = (1, 2, 4, 8)
SPEEDUP_PARTS = (8, 4, 2, 1)
"""Of the steps, the trainings have these parts."""
SPEEDUP_RATE = 0.75
"""Learning rate at 8 workers and the most steps, as a multiple of the workload's own."""

VOLUME_WORKERS = 4
VOLUME_TIMES = 2
"""Its trainings are longer by this factor, as long periods need."""

AVERAGE_WORKERS = (2, 4)

STREAM_WORKERS = 2
STREAM_STEPS = 384
"""So many periods that the last average, which nothing can hide, is a small part."""
STREAM_EVERY, STREAM_DELAY = 16, 12


@dataclass(frozen=True)
class Plan:
    """When to average what, and how.

    Attributes:
        label: For tables and plots.
        every: Local steps from one average of parameter changes to the next; 0 averages the gradient of every step.
        method: ``name:option=value,...`` of what is sent.
        outer_rate: Learning rate of the outer SGD with Nesterov momentum 0.9; 0 takes the average as it is.
        feedback: Decay of the residual memory; 0 for the memory that the method brings.
        fragments: Pieces of the model that are averaged in turn.
        delay: Local steps from sending an average off to taking it.
    """

    label: str
    every: int
    method: str = "dense"
    outer_rate: float = 0.0
    feedback: float = 0.0
    fragments: int = 1
    delay: int = 0


FULL = Plan("every step, fp32", 0)

CLAIM = (
    FULL,
    Plan("PQASGD 2 bits, p=2", 2, "qsgd:bits=2,owner=qsgd:2"),
    Plan("PQASGD 4 bits, p=4", 4, "qsgd:bits=4,owner=qsgd:4"),
    Plan("PQASGD 8 bits, p=5", 5, "qsgd:bits=8,owner=qsgd:8"),
)

SPEEDUP = Plan("PQASGD 4 bits, p=4", 4, "qsgd:bits=4,owner=qsgd:4")

VOLUME = (
    FULL,
    Plan("PQASGD 4 bits, p=4", 4, "qsgd:bits=4,owner=qsgd:4"),
    Plan("PQASGD 4 bits, p=16", 16, "qsgd:bits=4,owner=qsgd:4"),
    Plan("DiLoCo fp32, p=20", 20, outer_rate=0.7),
    Plan("DiLoCo 4 bits, p=20", 20, "qsgd:bits=4,owner=qsgd:4", outer_rate=0.7),
    Plan("DiLoCo 4 bits, p=40", 40, "qsgd:bits=4,owner=qsgd:4", outer_rate=0.7),
    Plan("DiLoCo 4 bits, p=60", 60, "qsgd:bits=4,owner=qsgd:4", outer_rate=0.7),
    Plan("SparseLoCo 2 %, p=20", 20, "topk:ratio=0.02,values=quantile:4", feedback=0.95),
    Plan("SparseLoCo 5 %, p=20", 20, "topk:ratio=0.05,values=quantile:4", feedback=0.95),
    Plan("SparseLoCo 5 %, p=60", 60, "topk:ratio=0.05,values=quantile:4", feedback=0.95),
)


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


def volume_runs(workload: Workload, seeds: Sequence[int], worker_steps: int) -> list[Run]:
    """Full communication, and recipes that send ever less; AdamW."""
    steps = VOLUME_TIMES * worker_steps // VOLUME_WORKERS
    return [Run(plan, seed, steps, workload.adam_rate) for seed in seeds for plan in VOLUME]


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
