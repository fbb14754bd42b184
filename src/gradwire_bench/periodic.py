"""Measures for ``gradwire bench periodic``: trainings and timings in worker processes, through the lab."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from gradwire_bench import launch
from gradwire_bench.data import DataSource
from gradwire_bench.optimizers import OptimizerName
from gradwire_bench.periodic_plans import Run
from gradwire_bench.periodic_results import Average, Outcome, Silence
from gradwire_bench.workloads import Workload

AVERAGED = ("dense", *(f"qsgd:bits={bits},owner=qsgd:{bits}" for bits in (8, 4, 2)), "topk:ratio=0.02")
"""Methods whose average is timed."""

SILENT_STEPS, SILENT_ROUNDS = 10, 600
AVERAGE_REPEATS, AVERAGE_SECONDS = 3, 10.0
"""An average is timed at least so often, and for at least so many seconds."""

_WORKER = "gradwire_bench.periodic_worker"

TEST_SAMPLES, LARGE_TEST_SAMPLES = 10_000, 100
"""Test samples that a small and a large model are judged by; the large ones are there to be timed."""


def train(
    workload: Workload,
    source: DataSource,
    workers: int,
    link: str,
    runs: Sequence[Run],
    *,
    optimizer: OptimizerName = "sgd",
    large: bool = False,
    batch: int | None = None,
    on_progress: Callable[[list[Outcome]], object],
) -> list[Outcome]:
    """Does trainings one after another in the same worker processes.

    Args:
        workload: The model.
        source: The data that it learns from.
        workers: Number of worker processes.
        link: Rate of each worker's link such as ``"100mbit"``, or ``"none"`` for plain loopback.
        runs: The trainings.
        optimizer: Of the local steps.
        large: Train the workload's own model; its small one otherwise.
        batch: Samples a worker and step; ``None`` for 16 images or 8 pieces of text.
        on_progress: Called with the outcomes so far from time to time.

    Returns:
        An outcome for every training; one that failed says why.
    """
    outcomes = [Outcome(run, workers) for run in runs]
    job = {
        "kind": "train",
        "workload": workload.name,
        "source": source.plain(),
        "batch": batch or workload.batch,
        "optimizer": optimizer,
        "large": large,
        "test_samples": LARGE_TEST_SAMPLES if large else TEST_SAMPLES,
        "runs": [dataclasses.asdict(run) for run in runs],
    }

    def on_step(outcome: Outcome, event: launch.Event) -> None:
        outcome.steps_done = event["step"]

    launch.race(_WORKER, job, workers, link, outcomes, on_step, lambda: on_progress(outcomes))
    return outcomes


def silence() -> list[Silence]:
    """Times optimizer steps with and without an averager that never sends, in turn, in two processes.

    CPU time; the median over rounds counts.
    """
    found: list[Silence] = []
    job = {"kind": "silence", "steps": SILENT_STEPS, "rounds": SILENT_ROUNDS}

    def take(event: launch.Event) -> None:
        found.append(Silence(event["optimizer"], event["alone"], event["attached"]))

    launch.launch(_WORKER, job, 2, launch.NO_LINK, take)
    return found


def averages(shapes: str, workers: int, link: str, on_progress: Callable[[list[Average]], object]) -> list[Average]:
    """Times the average of a model-shaped change of parameters, from asking for it to having it.

    Args:
        shapes: Whose shapes the model has, of ``gradwire_bench.shapes``.
        workers: Number of worker processes.
        link: Rate of each worker's link.
        on_progress: Called with the rows so far.
    """
    rows = [Average(method, workers) for method in AVERAGED]
    job = {
        "kind": "average",
        "shapes": shapes,
        "repeats": AVERAGE_REPEATS,
        "seconds": AVERAGE_SECONDS,
        "methods": list(AVERAGED),
    }
    launch.race(_WORKER, job, workers, link, rows, lambda row, event: None, lambda: on_progress(rows))
    if rate := launch.link_rate(link):
        for row in rows:
            row.link_seconds = None if row.metered_bytes is None else 8 * row.metered_bytes / rate
    return rows
