"""The frontier as a table and as a picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table
from rich.text import Text

from gradwire.methods.families import FAMILIES, family_of
from gradwire_bench import terminal
from gradwire_bench.frontier import DEADZONE, Frontier, Point, best_others
from gradwire_bench.pictures import figure_of, label_points, log_axis, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OWN = "#111111"
_BOUND = "#8a8a8a"
_COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#0072B2")
_DECIBELS = 16.0
"""Above the bound, at which what is further off is drawn."""


def table(frontier: Frontier) -> Table:
    """Own codec first, then every method by size, with how many times fewer bits the own one takes for its error."""
    heads = ("method", "granularity", "bits", "error", "dB above bound", "above Gaussian", "x bits of deadzone")
    found = terminal.table(f"{frontier.recording}, {frontier.numel / 1e6:.2f} M values", *heads, words=2)
    for point in (each for each in frontier.points if each.method.startswith(DEADZONE)):
        found.add_row(*_cells(point), "", style="bold" if point.granularity == "model" else "")
    for point, bits in sorted(best_others(frontier), key=lambda each: each[0].bits):
        found.add_row(*_cells(point), "" if math.isnan(bits) else f"{point.bits / bits:.1f}")
    return found


def _cells(point: Point) -> list[Text]:
    return [
        Text(point.method),
        Text(point.granularity),
        Text(f"{point.bits:.4g}"),
        Text(f"{point.error:.3g}"),
        Text(f"{point.decibels:.2f}"),
        Text(f"{point.gaussian_decibels:.2f}"),
    ]


def draw(frontiers: Sequence[Frontier], path: Path, subtitle: str) -> None:
    """Error against bits on the last recording of each model, and how far above the bound on all of them.

    Args:
        frontiers: By recording, named after model and time.
        path: The PNG file.
        subtitle: Where it was measured, in a line.
    """
    models = list(dict.fromkeys(each.recording.partition(",")[0] for each in frontiers))
    figure, above = figure_of((7.5 * len(models), 11), 2, len(models))
    figure.suptitle(f"Bits against error of one gradient, without a memory\n{subtitle}", x=0.01, ha="left", fontsize=9)
    for column, model in enumerate(models):
        own = [each for each in frontiers if each.recording.partition(",")[0] == model]
        _draw_errors(above[0][column], own[-1])
        _draw_distances(above[1][column], own, model)
    figure.canvas.draw()
    for column, model in enumerate(models):
        last = [each for each in frontiers if each.recording.partition(",")[0] == model][-1]
        shown = sorted(last.points, key=_by_layer)  # whose place has the name, if a method was measured in both ways
        named = {point.method.partition(" ")[0]: point for point in shown if point.error < 1}
        places = [(point.bits, _level(point), name) for name, point in named.items() if name != DEADZONE]
        label_points(figure, above[0][column], places)
    save(figure, path)


def _level(point: Point) -> float:
    return 10 * math.log10(max(point.error, 1e-6))


def _by_layer(point: Point) -> bool:
    return point.granularity == "layer"


def _draw_errors(axes: Axes, frontier: Frontier) -> None:
    axes.set_title(f"{frontier.recording}: {frontier.numel / 1e6:.2f} M values", loc="left")
    for curve, style, name in ((frontier.gaussian, ":", "bound, Gaussian layers"), (frontier.bound, "-", "bound")):
        shown = [(bits, 10 * math.log10(error)) for bits, error in zip(curve.bits, curve.errors, strict=True)]
        shown = [(bits, level) for bits, level in shown if 0.004 <= bits <= 9]
        axes.plot(*zip(*shown, strict=True), style, color=_BOUND, linewidth=1.5, label=name)
    _draw_families(axes, [point for point in frontier.points if point.error < 1], _level)
    _draw_own(axes, frontier, _level, 1.0, "deadzone, one step for the model")
    log_axis(axes)
    axes.set_xlim(0.004, 12)
    axes.set_ylim(-45, 1)
    axes.set_xlabel("bits a value (logarithmic)")
    axes.set_ylabel("squared error, dB of the gradient's square")
    axes.legend(frameon=False, fontsize=9, loc="lower left")


def _draw_distances(axes: Axes, frontiers: Sequence[Frontier], model: str) -> None:
    axes.set_title(f"{model}: above what values taken one by one can reach", loc="left")
    points = [point for each in frontiers for point in each.points if point.error < 1]
    _draw_families(axes, points, lambda point: min(point.decibels, _DECIBELS))
    for frontier, strength in zip(frontiers, np.linspace(0.4, 1, len(frontiers)), strict=True):
        when = frontier.recording.partition(", ")[2]
        _draw_own(axes, frontier, lambda point: point.decibels, float(strength), f"deadzone, {when}")
    axes.axhline(0, color=_BOUND, linewidth=1.5)
    axes.axhline(1.8, color=_BOUND, linewidth=1, linestyle="--")
    log_axis(axes)
    axes.set_xlim(0.004, 12)
    axes.set_ylim(-4, _DECIBELS + 0.5)
    axes.set_xlabel("bits a value (logarithmic)")
    axes.set_ylabel("dB above the bound; dashed: 1.8")
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[-len(frontiers) :], names[-len(frontiers) :], frameon=False, fontsize=9, loc="upper left")


def _draw_own(axes: Axes, frontier: Frontier, height: Callable[[Point], float], strength: float, name: str) -> None:
    own = [each for each in frontier.points if each.method.startswith(DEADZONE) and each.granularity == "model"]
    line = [(point.bits, height(point)) for point in own]
    axes.plot(*zip(*line, strict=True), "o-", color=_OWN, markersize=4, linewidth=2, alpha=strength, label=name)


def _draw_families(axes: Axes, points: Sequence[Point], height: Callable[[Point], float]) -> None:
    """Filled where one segment is the model, else hollow."""
    points = [point for point in points if not point.method.startswith(DEADZONE)]
    families = [family for family in FAMILIES if any(family_of(point.method.split()[0]) == family for point in points)]
    for family, colour in zip(families, _COLOURS, strict=False):
        chosen = [point for point in points if family_of(point.method.split()[0]) == family]
        for filled in (False, True):
            some = [(point.bits, height(point)) for point in chosen if (point.granularity == "model") == filled]
            face = colour if filled else "white"
            if some:
                name = f"{family}, {'model' if filled else 'layers'}"
                axes.plot(*zip(*some, strict=True), "o", color=colour, markerfacecolor=face, markersize=5.5, label=name)
