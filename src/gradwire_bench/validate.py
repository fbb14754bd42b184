"""``gradwire bench validate``: step times as predicted from what a group measures of itself, against those measured."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from gradwire import lab
from gradwire.cost.advice import Candidate
from gradwire.cost.costs import profile
from gradwire.cost.network import Line, Measured
from gradwire.cost.shapes import get
from gradwire.cost.simulation import Setting, plain, simulate
from gradwire.cost.workload import Workload
from gradwire_bench.contenders import DDP, Contender
from gradwire_bench.pictures import BASELINE_COLOUR, COLOURS, _figure, _save
from gradwire_bench.sync import link_rate

METHODS = (
    DDP,
    "bf16",
    "efsignsgd",
    "topk:ratio=0.01",
    "acpsgd:rank=4",
    "powersgd:rank=4",
    "qsgd:bits=4,owner=qsgd:4",
    "randomk:ratio=0.01",
)
BUDGET = 12.0
"""Seconds of timed steps for each contender."""


@dataclass(frozen=True)
class Point:
    """One method in one setting.

    Attributes:
        method: Which.
        link: Rate as written.
        workers: How many.
        predicted: Seconds of a step.
        measured: Its median.
        quartiles: Of what was measured.
        stages: As predicted: encode, wire and decode.
        stages_measured: The same, of rank 0's wire thread.
    """

    method: str
    link: str
    workers: int
    predicted: float
    measured: float
    quartiles: tuple[float, float]
    stages: dict[str, float]
    stages_measured: dict[str, float]

    @property
    def error(self) -> float:
        """Relative to what was measured; negative where the prediction is too short."""
        return self.predicted / self.measured - 1


def measure(
    shapes: str, workers: int, link: str, methods: Sequence[str], steps: int, device: str, say: Callable[[str], object]
) -> tuple[list[Point], dict[str, Any]]:
    """Measures and predicts in one setting; what was probed comes with it."""
    racers = [Contender.parse(text) for text in methods]
    job = {
        "shapes": shapes,
        "methods": [str(racer) for racer in racers],
        "steps": steps,
        "budget": BUDGET,
        "timeout": 300.0,
        "shaped": link_rate(link) is not None,
    }
    probed: dict[str, Any] = {}
    results: dict[int, dict[str, Any]] = {}

    def on_line(rank: int, line: str) -> None:
        if line.startswith("{"):
            event = json.loads(line)
            if event["event"] == "probe":
                probed.update(event)
            elif event["event"] == "result":
                results[event["row"]] = event
            say(f"{link}, {workers} workers: {event['event']} {event['row']}")

    with lab.Lab(workers=workers, rate=None if link_rate(link) is None else link) as shaped:
        shaped.run([sys.executable, "-m", "gradwire_bench.validate_worker", json.dumps(job)], on_line=on_line)
    probed["cores"] = len(os.sched_getaffinity(0))
    setting = setting_of(shapes, probed, device)
    points = []
    for row, racer in enumerate(racers):
        if row in results:
            seen = results[row]["seconds"]
            told = plain(setting) if racer.name == DDP else _predicted(racer, setting)
            quarters = statistics.quantiles(seen, n=4) if len(seen) > 1 else [seen[0]] * 3
            points.append(
                Point(
                    str(racer),
                    link,
                    workers,
                    told.seconds,
                    statistics.median(seen),
                    (quarters[0], quarters[2]),
                    {"encode": told.encode, "wire": told.wire, "decode": told.decode},
                    results[row]["stages"],
                )
            )
    return points, {"link": link, "workers": workers, "load": os.getloadavg()[0], **probed}


def again(document: dict[str, Any], device: str) -> list[Point]:
    """What a document of this command measured, predicted anew from what its groups probed."""
    settings = {
        (probed["link"], probed["workers"]): setting_of(document["shapes"], probed, device)
        for probed in document["probes"]
    }
    points = []
    for point in document["points"]:
        setting, racer = settings[point["link"], point["workers"]], Contender.parse(point["method"])
        told = plain(setting) if racer.name == DDP else _predicted(racer, setting)
        kept = {each.name: point[each.name] for each in fields(Point)}
        stages = {"encode": told.encode, "wire": told.wire, "decode": told.decode}
        points.append(Point(**{**kept, "predicted": told.seconds, "stages": stages}))
    return points


def _predicted(racer: Contender, setting: Setting) -> Any:
    return simulate(Candidate.make(racer.name, dict(racer.options)).configuration, setting)


def setting_of(shapes: str, probed: dict[str, Any], device: str) -> Setting:
    """The setting that a group saw itself in."""
    lines = {kind: Line(**line) for kind, line in probed["network"]["lines"].items()}
    network = Measured(probed["network"]["workers"], lines)
    buckets = Workload.of(get(shapes), 0.0).buckets
    works = tuple(probed["backward"])
    if len(works) != len(buckets):
        works = tuple(sum(works) * bucket[-1].stop / get(shapes).numel for bucket in buckets)
    cores = probed["cores"] / network.workers
    pace = min(1.0, probed["core_share"])
    return Setting(Workload(buckets, works, 0.0), network, profile(device), cores, pace)


def errors(points: Sequence[Point]) -> dict[str, float]:
    """Median and 90th percentile of relative errors, and how often the best three are ranked right."""
    sizes = sorted(abs(point.error) for point in points)
    settings: dict[tuple[str, int], list[Point]] = {}
    for point in points:
        settings.setdefault((point.link, point.workers), []).append(point)
    right = [_best(group, "predicted") == _best(group, "measured") for group in settings.values()]
    return {
        "median": statistics.median(sizes),
        "p90": sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))],
        "best_three_right": sum(right) / len(right),
    }


def _best(points: Sequence[Point], by: str) -> set[str]:
    return {point.method for point in sorted(points, key=lambda point: float(getattr(point, by)))[:3]}


def scatter_plot(points: Sequence[Point], path: Path, shapes: str, error: float) -> None:
    """Draws what was predicted against what was measured; ``error`` is the median one."""
    figure, axes = _figure((6.5, 6))
    methods = list(dict.fromkeys(point.method for point in points))
    marks = {"none": "o", "1gbit": "s", "100mbit": "^", "300mbit": "v"}
    for method, colour in zip(methods, (BASELINE_COLOUR, *COLOURS), strict=False):
        for link in dict.fromkeys(point.link for point in points):
            own = [point for point in points if point.method == method and point.link == link]
            axes.plot(
                [1e3 * point.measured for point in own],
                [1e3 * point.predicted for point in own],
                marks.get(link, "D"),
                color=colour,
                label=method if link == points[0].link else None,
            )
    ends = [
        1e3 * min(min(p.measured, p.predicted) for p in points),
        1e3 * max(max(p.measured, p.predicted) for p in points),
    ]
    axes.plot(ends, ends, color="#222222", linewidth=0.8)
    axes.fill_between(
        ends, [0.75 * e for e in ends], [1.25 * e for e in ends], color="#222222", alpha=0.08, linewidth=0
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("measured ms a step")
    axes.set_ylabel("predicted ms a step (grey: within 25 %)")
    axes.legend(frameon=False, fontsize=8)
    links = ", ".join(f"{mark} {link}" for link, mark in (("none", "●"), ("1gbit", "■"), ("100mbit", "▲")))
    axes.text(
        0,
        1.02,
        f"{shapes}, averages alone; median error {100 * error:.0f} %; {links}",
        transform=axes.transAxes,
        fontsize=8,
        color="#666666",
    )
    _save(figure, path)
