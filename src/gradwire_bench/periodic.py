"""Measures for ``gradwire bench periodic``: trainings and timings in worker processes, through the lab."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

from gradwire import lab
from gradwire.errors import LabError
from gradwire_bench.data import DataSource
from gradwire_bench.periodic_plans import Run
from gradwire_bench.periodic_results import Average, Outcome, Silence
from gradwire_bench.worker import ended_early
from gradwire_bench.workloads import Workload

Optimizer = Literal["sgd", "adamw"]

AVERAGED = ("dense", *(f"qsgd:bits={bits},owner=qsgd:{bits}" for bits in (8, 4, 2)), "topk:ratio=0.02")
"""Methods whose average is timed."""

SILENT_STEPS, SILENT_ROUNDS = 10, 600
AVERAGE_REPEATS, AVERAGE_SECONDS = 3, 10.0
"""An average is timed at least so often, and for at least so many seconds."""

TEST_SAMPLES, LARGE_TEST_SAMPLES = 10_000, 100
"""Test samples that a small and a large model are judged by; the large ones are there to be timed."""


def train(
    workload: Workload,
    source: DataSource,
    workers: int,
    rate: str | None,
    runs: Sequence[Run],
    *,
    optimizer: Optimizer = "sgd",
    large: bool = False,
    batch: int | None = None,
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
        shapes: Whose shapes the model has, of ``gradwire_bench.shapes``.
        workers: Number of worker processes.
        rate: Rate of each worker's link.
        on_progress: Called with the rows so far.
    """
    rows = [Average(method, workers) for method in AVERAGED]
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

    job = {
        "kind": "average",
        "shapes": shapes,
        "repeats": AVERAGE_REPEATS,
        "seconds": AVERAGE_SECONDS,
        "methods": list(AVERAGED),
    }
    ended = _work(job, workers, rate, take)
    for row in rows:
        if ended and not row.seconds and row.error is None:
            row.error = ended
    return rows


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
            network.run([sys.executable, "-m", "gradwire_bench.periodic_worker", json.dumps(job)], on_line=on_line)
    except LabError as error:
        if must_succeed or not told:
            raise
        return ended_early(error)
    return None
