"""``gradwire bench validate``: step times as predicted from what a group measures of itself, against those measured."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from gradwire.cost.advice import GAIN
from gradwire.cost.costs import Profile
from gradwire.cost.network import Line, Measured
from gradwire.cost.simulation import Setting, plain, simulate
from gradwire.cost.workload import Workload
from gradwire.layout import Slot
from gradwire_bench import launch
from gradwire_bench.contenders import DDP, Contender
from gradwire_bench.pictures import BASELINE_COLOUR, COLOURS, axes_of, save, titled

METHODS = (
    DDP,
    "bf16",
    "efsignsgd",
    "topk:ratio=0.01",
    "acpsgd:rank=4",
    "powersgd:rank=4",
    "qsgd:bits=4,owner=qsgd:4",
    "randomk:ratio=0.01",
    "subspace:bits=0.8",
)
MODES = ("sync", "backward")
"""Averages alone; and with a real backward pass."""

BUDGET = 4.0
"""Seconds of timed steps for each contender."""

STEPS = 9
"""Timed steps of each contender, if no other number is asked for."""

DRAWS = 4000
"""Measurements that are drawn of each setting."""

QUARTILES = 1.349
"""Standard deviations between the quartiles of normal numbers."""

CONSTANTS = (0.0, 2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
"""Seconds that are tried for what is calibrated."""


@dataclass(frozen=True)
class Fit:
    """What is calibrated, on settings that are not reported.

    Attributes:
        late: Seconds that a collective takes beyond what was probed: :attr:`gradwire.cost.network.Measured.late`.
        turn: Seconds that a step takes around its averages: :attr:`gradwire.cost.simulation.Setting.turn`.
    """

    late: float = 0.0
    turn: float = 0.0


@dataclass(frozen=True)
class Point:
    """One method in one setting.

    Attributes:
        method: Which.
        link: Rate as written.
        workers: How many.
        mode: One of :data:`MODES`.
        predicted: Seconds of a step.
        measured: Its median.
        quartiles: Of what was measured.
        stages: As predicted: encode, wire and decode.
        stages_measured: The same, of rank 0's wire thread.
    """

    method: str
    link: str
    workers: int
    mode: str
    predicted: float
    measured: float
    quartiles: tuple[float, float]
    stages: dict[str, float]
    stages_measured: dict[str, float]

    @property
    def error(self) -> float:
        """Relative to what was measured; negative where the prediction is too short."""
        return self.predicted / self.measured - 1

    @property
    def setting(self) -> tuple[str, int, str]:
        """Where it was measured."""
        return self.link, self.workers, self.mode


def measure(
    workers: int, link: str, methods: Sequence[str], steps: int, say: Callable[[str], object]
) -> tuple[list[Point], list[dict[str, Any]]]:
    """Measures and predicts averages of one group, alone and with backward; what was probed comes with it."""
    job = {"methods": list(methods), "modes": MODES, "steps": steps, "budget": BUDGET, "timeout": 300.0}
    probes: list[dict[str, Any]] = []
    points: list[Point] = []

    def take(event: launch.Event) -> None:
        if event["event"] == "probe":
            probes.append({"link": link, "workers": workers, "load": os.getloadavg()[0], **event})
        elif event["event"] == "result":
            points.append(_point(methods[event["row"]], probes[-1], event["seconds"], event["stages"]))
        doing = methods[event["row"]] if event["row"] >= 0 else "its collectives and codecs"
        say(f"{link}, {workers} workers, {probes[-1]['mode'] if probes else ''}: {doing}")

    launch.launch("gradwire_bench.validate_worker", job, workers, link, take)
    return points, probes


def _point(method: str, probed: dict[str, Any], seconds: Sequence[float], stages: dict[str, float]) -> Point:
    quarters = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3
    place = probed["link"], probed["workers"], probed["mode"]
    measured = statistics.median(seconds)
    point = Point(method, *place, 0.0, measured, (quarters[0], quarters[2]), {}, stages)
    return predicted(point, setting_of(probed, Fit()))


def predicted(point: Point, setting: Setting) -> Point:
    """The same with what the model says now."""
    racer = Contender.parse(point.method)
    told = plain(setting) if racer.name == DDP else simulate(racer.configuration(), setting)
    stages = {"encode": told.encode, "wire": told.wire, "decode": told.decode}
    return replace(point, predicted=told.seconds, stages=stages)


def read(document: Mapping[str, Any]) -> tuple[list[Point], list[dict[str, Any]]]:
    """What was measured, and what the groups probed, of a document that this command wrote."""
    names = [each.name for each in fields(Point)]
    return [Point(**{name: each[name] for name in names}) for each in document["points"]], document["probes"]


def again(points: Sequence[Point], probes: Sequence[dict[str, Any]], fit: Fit) -> list[Point]:
    """What was measured, predicted anew from what the groups probed, with other constants."""
    settings = {(probed["link"], probed["workers"], probed["mode"]): setting_of(probed, fit) for probed in probes}
    return [predicted(point, settings[point.setting]) for point in points]


def setting_of(probed: dict[str, Any], fit: Fit) -> Setting:
    """The setting that a group saw itself in."""
    lines = {kind: Line(**{**line, "spread": 0.0}) for kind, line in probed["network"]["lines"].items()}
    network = Measured(probed["network"]["workers"], lines, fit.late)
    seen = probed["workload"]
    buckets = tuple(tuple(Slot(**{**slot, "shape": tuple(slot["shape"])}) for slot in each) for each in seen["buckets"])
    workload = Workload(buckets, tuple(seen["backward"]), 0.0)  # what comes before backward is not timed
    profile = Profile.of_plain(probed["profile"])
    methods = {key: replace(costs, spread=0.0) for key, costs in profile.methods.items()}  # one run each, not three
    profile = replace(profile, methods=methods)
    return Setting(workload, network, profile, probed["cores"], turn=fit.turn)


def parted(points: Sequence[Point]) -> tuple[list[Point], list[Point]]:
    """Settings to calibrate by and settings to report, like the colours of a chessboard."""
    axes = [list(dict.fromkeys(point.setting[axis] for point in points)) for axis in range(3)]
    colour = [sum(axes[axis].index(point.setting[axis]) for axis in range(3)) % 2 for point in points]
    return tuple([p for p, c in zip(points, colour, strict=True) if c == part] for part in (0, 1))  # type: ignore[return-value]


def calibrated(points: Sequence[Point], probes: Sequence[dict[str, Any]], say: Callable[[str], object]) -> Fit:
    """The constants with which the points of a part are told best: one, then the other, twice."""

    def cost(fit: Fit) -> float:
        say(f"calibrating: {fit}")
        told = again(points, probes, fit)
        return statistics.median(abs(math.log(point.predicted / point.measured)) for point in told)

    best = Fit()
    for name in ("late", "turn", "late"):
        best = min((replace(best, **{name: value}) for value in CONSTANTS), key=cost)
    return best


def errors(points: Sequence[Point]) -> dict[str, float]:
    """Of relative errors the median and 90th percentile; how often the best three and a recommendation are right.

    The best three of a setting are right if they are those with the three least medians; they are within the spread if
    none of them was measured slower than the third best, as far as quartiles tell them apart. At best a prediction is
    right as often as the likeliest three are measured, if steps are normal with the quartiles that were measured.
    """
    sizes = sorted(abs(point.error) for point in points)
    settings: dict[tuple[str, int, str], list[Point]] = {}
    for point in points:
        settings.setdefault(point.setting, []).append(point)
    right = [_names(group, "predicted") == _names(group, "measured") for group in settings.values()]
    within = [_within_spread(group) for group in settings.values()]
    at_best = [_at_best(group) for group in settings.values()]
    misled = [_misled(group) for group in settings.values()]
    return {
        "median": statistics.median(sizes),
        "p90": sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))],
        "best_three_right": sum(right) / len(right),
        "best_three_within_spread": sum(within) / len(within),
        "best_three_at_best": sum(at_best) / len(at_best),
        "recommended_and_slower": sum(misled) / len(misled),
    }


def _misled(points: Sequence[Point]) -> bool:
    """Whether a compressed method would be recommended in a setting, and is slower there than an exact average."""
    exact = [point for point in points if point.method in (DDP, "bf16")]
    first = min((point for point in points if point not in exact), key=lambda point: point.predicted, default=None)
    if first is None or not exact or first.predicted >= (1 - GAIN) * min(point.predicted for point in exact):
        return False
    return first.measured > min(point.measured for point in exact)


def signed(points: Sequence[Point]) -> dict[str, dict[str, float]]:
    """The median signed error of each part: where the model is wrong, and in which direction."""
    parts: dict[str, dict[str, list[float]]] = {}
    for point in points:
        keys = {"method": point.method, "link": point.link, "workers": f"{point.workers} workers", "mode": point.mode}
        for name, key in keys.items():
            parts.setdefault(f"signed, by {name}", {}).setdefault(key, []).append(point.error)
    return {part: {key: statistics.median(errors) for key, errors in groups.items()} for part, groups in parts.items()}


def _within_spread(points: Sequence[Point]) -> bool:
    *_, third = _best(points, "measured")
    return all(point.quartiles[0] <= third.quartiles[1] for point in _best(points, "predicted"))


def _at_best(points: Sequence[Point]) -> float:
    """How often measurements of :data:`STEPS` steps find those to be the best three that they find most often."""
    generator = np.random.default_rng(0)
    spreads = [(high - low) / QUARTILES for low, high in (point.quartiles for point in points)]
    steps = [
        generator.normal(point.measured, spread, (DRAWS, STEPS)) for point, spread in zip(points, spreads, strict=True)
    ]
    medians = np.stack([np.median(each, axis=1) for each in steps], axis=1)
    best = np.sort(np.argsort(medians, axis=1)[:, :3], axis=1)
    return int(np.unique(best, axis=0, return_counts=True)[1].max()) / DRAWS


def _names(points: Sequence[Point], by: str) -> set[str]:
    return {point.method for point in _best(points, by)}


def _best(points: Sequence[Point], by: str) -> list[Point]:
    return sorted(points, key=lambda point: float(getattr(point, by)))[:3]


def scatter_plot(points: Sequence[Point], path: Path, error: float) -> None:
    """Draws what was predicted against what was measured; ``error`` is the median one."""
    figure, axes = axes_of((6.5, 6))
    methods = list(dict.fromkeys(point.method for point in points))
    marks = {"none": "o", "1gbit": "s", "100mbit": "^", "300mbit": "v"}
    for method, colour in zip(methods, (BASELINE_COLOUR, *COLOURS * len(methods)), strict=False):
        for link, mode in dict.fromkeys((point.link, point.mode) for point in points):
            own = [point for point in points if (point.method, point.link, point.mode) == (method, link, mode)]
            axes.plot(
                [1e3 * point.measured for point in own],
                [1e3 * point.predicted for point in own],
                marks.get(link, "D"),
                color=colour,
                fillstyle="full" if mode == "sync" else "none",
                label=method if (link, mode) == (points[0].link, points[0].mode) else None,
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
    marked = {"none": "●", "1gbit": "■", "300mbit": "▼", "100mbit": "▲"}
    links = ", ".join(f"{mark} {link}" for link, mark in marked.items())
    caption = f"settings that nothing was fitted to; median error {100 * error:.0f} %\nfull: averages alone; {links}"
    titled(axes, "", caption)
    save(figure, path)
