"""Records of the suite that nobody measured."""

from __future__ import annotations

import random
from typing import Any

from gradwire_bench import origin
from gradwire_bench.cell import Cell, Record
from gradwire_bench.suite.plan import Plan
from gradwire_bench.suite.tables import PHASES, STAGES

MACHINE = origin.machine()


def record(cell: Cell, why: str | None = None, **result: Any) -> Record:
    return Record(cell, result, 1.0, cell.command("gradwire bench suite"), "2026-11-23T00:00:00+00:00", MACHINE, why)


def trial(method: str, quality: float, seed: int = 0, **axes: Any) -> Record:
    sent = 100.0 if method == "ddp" else 10.0
    figures: dict[str, Any] = {"accuracy": quality, "loss": 1 - quality, "sent_bytes": sent, "dense_bytes": 100.0}
    return record(Cell("trial", axes.pop("workload", "alexnet"), method, seed=seed, **axes), **figures)


def of_every_kind() -> list[Record]:
    phases = {"forward": 0.01, "backward": 0.02, "update": 0.001, "encode": 0.002, "wire": 0.003, "decode": 0.001}
    found = []
    for number, method in enumerate(("ddp", "topk:ratio=0.01", "acpsgd:rank=4", "torch-fp16"), start=1):
        for seed in (0, 1):
            found.append(trial(method, 0.9 - 0.01 * number + 0.001 * seed, seed))
        metered = None if method in ("ddp", "torch-fp16") else 50.0
        figures: dict[str, Any] = {"metered_bytes": metered, "interface_bytes": 60.0, "dense_bytes": 100.0}
        curve = [{"step": step, "seconds": 0.1 * step, "accuracy": 0.08 * step} for step in range(1, 6)]
        found.append(
            record(
                Cell("train", "image", method, link="100mbit"),
                **figures,
                accuracy=0.8,
                step_seconds=[0.1 * number],
                phases={name: number * seconds for name, seconds in phases.items()},
                peak_bytes=3 * 10**8,
                curve=curve,
                target_accuracy=0.3,
                seconds_to_target=None,
            )
        )
        for link in ("1gbit", "100mbit"):
            cell = Cell("sync", "resnet50", method, link=link)
            found.append(record(cell, **figures, seconds=[0.1 * number], stages={"wire": 0.1}))
        if method.startswith("topk"):
            for scope in ("layer", "model"):
                cell = Cell("codec", "image", method, granularity=scope)
                found.append(record(cell, bits=0.4, error=0.5))
    return [*found, record(Cell("train", "ncf", "ddp"), why="ConfigurationError: MovieLens-100k <is> not there")]


def of_plan(plan: Plan) -> list[Record]:
    """A record of every cell, with figures as long as measured ones."""
    draw = random.Random(0)
    return [record(cell, **_made_up(cell, draw)) for cell in plan.cells]


def _made_up(cell: Cell, draw: random.Random) -> dict[str, Any]:
    steps = [draw.uniform(0.1, 1.0) for _ in range(min(cell.steps, 100))]
    sent = {"metered_bytes": draw.uniform(1e4, 1e6), "interface_bytes": draw.uniform(1e4, 1e6), "dense_bytes": 1e6}
    learnt = {"accuracy": draw.uniform(0.5, 0.9), "loss": draw.uniform(0.5, 2.0)}
    phases = {name: draw.uniform(0.001, 0.1) for name in PHASES[:-1]}
    if cell.kind == "trial":
        return {
            **learnt,
            "sent_bytes": draw.uniform(1e4, 1e6),
            "dense_bytes": 1e6,
            "parameters": f"{draw.getrandbits(64):016x}",
        }
    if cell.kind == "train":
        points = range(10, cell.steps + 1, 10)
        curve = [{"step": n, "seconds": n * draw.uniform(0.1, 0.2), "accuracy": draw.uniform(0.5, 0.9)} for n in points]
        times = {"step_seconds": steps, "losses": steps, "phases": phases, "peak_bytes": draw.randrange(10**9)}
        return {**learnt, **sent, **times, "curve": curve, "target_accuracy": 0.85, "seconds_to_target": None}
    if cell.kind == "sync":
        return {**sent, "seconds": steps, "stages": {name: phases[name] for name in STAGES}}
    if cell.kind == "codec":
        return {"bits": draw.uniform(0.01, 16), "error": draw.uniform(1e-6, 1)}
    figures = {name: draw.uniform(1, 10) for name in ("times_copy", "gigabytes_per_second", "peak_extra_bytes")}
    return {"seconds": steps, **figures}
