"""Records of the suite that nobody measured."""

from __future__ import annotations

from typing import Any

from gradwire_bench import report
from gradwire_bench.suite.cell import Cell, Record

MACHINE = report.machine()


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
