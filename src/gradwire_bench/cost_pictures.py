"""Pictures of what the simulator says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gradwire.cost.advice import Candidate
from gradwire.cost.scene import Scene
from gradwire.cost.shapes import Model
from gradwire.cost.simulation import plain, simulate
from gradwire.units import written
from gradwire_bench.pictures import BASELINE_COLOUR, COLOURS, axes_of, save, titled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RATES = tuple(float(rate) for rate in np.geomspace(1e8, 4e11, 13))
"""100 Mbit/s to 400 Gbit/s."""

MOST_CURVES = 7


@dataclass(frozen=True)
class Curve:
    """Step times of one way to average.

    Attributes:
        label: Which.
        seconds: One for each of :data:`RATES`.
    """

    label: str
    seconds: tuple[float, ...]


def curves(scene: Scene, model: Model, tried: Sequence[Candidate]) -> list[Curve]:
    """DDP in float32 first, then each candidate."""
    settings = [scene.setting(model, rate) for rate in RATES]
    found = [Curve("DDP fp32", tuple(plain(setting).seconds for setting in settings))]
    for each in tried:
        seconds = tuple(simulate(each.configuration, setting).seconds for setting in settings)
        found.append(Curve(each.label, seconds))
    return found


def crossings(first: Sequence[float], second: Sequence[float], margin: float = 0.02) -> list[float]:
    """Rates at which ``second`` stops to be faster than ``first`` by more than a margin, by interpolation."""
    gains = [np.log((1 - margin) * a / b) for a, b in zip(first, second, strict=True)]
    return [
        float(np.exp(np.interp(0.0, [-gains[i], -gains[i + 1]], np.log([RATES[i], RATES[i + 1]]))))
        for i in range(len(RATES) - 1)
        if gains[i] > 0 >= gains[i + 1]
    ]


def bandwidth_plot(scene: Scene, model: Model, tried: Sequence[Candidate], path: Path) -> None:
    """Draws step time against the rate of the links, and where a method stops to gain over the better dense average.

    Args:
        scene: All but the rate.
        model: The model.
        tried: Ways to average; of each method the one that is fastest at the most rates is drawn.
        path: Where the picture goes.
    """
    usual = [each for each in tried if "granularity" not in each.arguments] or list(tried)
    found = _one_each(curves(scene, model, usual))
    figure, axes = axes_of((8, 5))
    draw_curves(axes, found)
    titled(axes, "", f"{scene.shapes}, {scene.workers} workers, a step takes {scene.step_time}, {scene.device}")
    save(figure, path)


def draw_curves(axes: Axes, found: Sequence[Curve]) -> None:
    """Draws curves, and a dot where each stops to gain over the better of the dense ones."""
    dense = [curve.seconds for curve in found if curve.label in ("DDP fp32", "bf16")]
    best = [min(seconds) for seconds in zip(*dense, strict=True)]
    for curve, colour in zip(found, (BASELINE_COLOUR, *COLOURS), strict=False):
        axes.plot(RATES, [1e3 * each for each in curve.seconds], color=colour, label=curve.label)
        if curve.seconds not in dense:
            for rate in crossings(best, curve.seconds):
                height = 1e3 * float(np.exp(np.interp(np.log(rate), np.log(RATES), np.log(curve.seconds))))
                axes.plot([rate], [height], "o", color=colour, markersize=6)
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = [1e8, 1e9, 1e10, 1e11, 4e11]
    axes.set_xticks(ticks, [written(tick) for tick in ticks])
    axes.set_xlabel("rate of a link; dots: from here on less than 2 % faster than the best dense average")
    axes.set_ylabel("ms a step")
    axes.legend(frameon=False, fontsize=8)


def _one_each(found: Sequence[Curve]) -> list[Curve]:
    """Of each method its fastest curve, as many as there are colours; those that are fastest somewhere first."""
    chosen: dict[str, Curve] = {}
    for curve in found:
        name = curve.label.partition(":")[0]
        known = chosen.get(name)
        if known is None or sum(curve.seconds) < (1 - 1e-3) * sum(known.seconds):
            chosen[name] = curve
    full, *others = chosen.values()
    dense = [curve for curve in others if curve.label == "bf16"]
    others = sorted((curve for curve in others if curve not in dense), key=lambda curve: sum(np.log(curve.seconds)))
    return [full, *dense, *others[: MOST_CURVES - 1 - len(dense)]]
