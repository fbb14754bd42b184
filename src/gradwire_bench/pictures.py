"""Pictures of what a benchmark measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gradwire_bench import cookbook, origin, recipes
from gradwire_bench.catalogue import Entry, Measurement
from gradwire_bench.origin import require
from gradwire_bench.periodic_results import Row, Speedup
from gradwire_bench.train import TrainRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

_MB = 1e6
_LEAST_ERROR = 1e-9
"""Errors below it are drawn there: an exact average has none."""
_STEP, _RADIUS = 2.0, 4.0
"""Pixels by which a name is moved until it is free of others, and that it keeps from the middle of points."""

# Okabe and Ito's palette, which people with any colour vision can tell apart; grey is for the baseline.
BASELINE_COLOUR = "#5f5f5f"
COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#0072B2", "#B8A800", "#7A4EAB")
_INK = "#222222"
_FULL_SHARE = 0.9
"""A plan that sends at least so much is full communication."""
_LEAST_REACH = 3.0
"""Percentage points above and below the middle that an accuracy axis shows at least, lest chance look like a gap."""


def train_plots(rows: Sequence[TrainRow], folder: Path, subtitle: str) -> list[Path]:
    """Draws the pictures of a training race: accuracy against time, step time, and bytes against accuracy.

    Args:
        rows: The contenders; those without result are left out.
        folder: Where the PNG files go.
        subtitle: Where and on what it was measured, in a line.

    Returns:
        The files written.
    """
    done = [row for row in rows if row.accuracy is not None]
    if not done:
        return []
    colours = {row.label: colour for row, colour in zip(done, (BASELINE_COLOUR, *COLOURS * len(done)), strict=False)}
    pictures: dict[str, tuple[str, Callable[[Axes, Sequence[TrainRow], dict[str, str]], None]]] = {
        "accuracy_over_time.png": ("Test accuracy against training time", _draw_accuracy_over_time),
        "step_time.png": ("Time of a training step", _draw_step_time),
        "accuracy_over_bytes.png": ("Final test accuracy against bytes sent", _draw_accuracy_over_bytes),
    }
    for name, (title, draw) in pictures.items():
        figure, axes = axes_of()
        draw(axes, done, colours)
        titled(axes, title, subtitle)
        save(figure, folder / name)
    return [folder / name for name in pictures]


def size_error_plot(entries: Sequence[Entry], measured: Sequence[Measurement], path: Path, subtitle: str) -> None:
    """Draws every method's error on real gradients against what it writes for an element.

    Args:
        entries: What the methods say of themselves.
        measured: What they were seen to do, in the same order; those without an error are left out.
        path: The PNG file.
        subtitle: On what it was measured, in a line.
    """
    figure, axes = axes_of((10, 7.5))
    titled(axes, "Error of one step against size, without a memory", subtitle)
    points = [
        (entry, each, each.error) for entry, each in zip(entries, measured, strict=True) if each.error is not None
    ]
    for kind, colour in zip(("unbiased", "contractive", "biased", "exact"), COLOURS[2:], strict=False):
        chosen = [(each.bits, max(error, _LEAST_ERROR)) for entry, each, error in points if entry.bias == kind]
        axes.plot(*zip(*chosen, strict=True), "o", color=colour, markersize=6, label=kind) if chosen else None
    log_axis(axes)
    axes.set_yscale("log")
    axes.set_xlabel("bits a worker writes for an element (logarithmic)")
    axes.set_ylabel("|average - mean|² / |mean|² (logarithmic)")
    axes.legend(frameon=False, fontsize=9)
    axes.margins(0.08)
    label_points(figure, axes, [(each.bits, max(error, _LEAST_ERROR), entry.name) for entry, each, error in points])
    save(figure, path)


def volume_plot(rows: Sequence[Row], path: Path, title: str, subtitle: str) -> None:
    """Draws the loss of each plan against its bytes, with the range over the seeds, beside full communication's.

    Args:
        rows: The plans, full communication first; those without result are left out.
        path: The PNG file.
        title: What was trained.
        subtitle: Where, in a line.
    """
    figure, axes = axes_of((9, 5.4))
    titled(axes, title, subtitle)
    shown = [(row, row.share, row.loss) for row in rows if row.loss is not None and row.share]
    families = dict.fromkeys(row.label.split()[0] for row, _, _ in shown)
    colours = dict(zip(families, (BASELINE_COLOUR, *COLOURS * len(families)), strict=False))
    full = next((loss for _, share, loss in shown if share > _FULL_SHARE), None)
    if full is not None:
        axes.axhspan(full.least, full.most, color="#dddddd", zorder=0, linewidth=0)
    for row, share, loss in shown:
        colour = colours[row.label.split()[0]]
        reach = ([loss.mean - loss.least], [loss.most - loss.mean])
        axes.errorbar(100 * share, loss.mean, reach, fmt="o", color=colour, markersize=7, capsize=3, linewidth=1)
    log_axis(axes)
    axes.set_xlabel("bytes sent in % of fp32 averages every step (logarithmic)")
    axes.set_ylabel("loss on held-out data in nats")
    axes.margins(x=0.22, y=0.1)
    label_points(figure, axes, [(100 * share, loss.mean, row.label) for row, share, loss in shown])
    save(figure, path)


def recipes_plot(rows: Sequence[recipes.Row], path: Path) -> None:
    """Draws what each method loses against dense averages, over bytes, a panel a workload and optimizer.

    Args:
        rows: Settled methods, cell by cell, dense averages of each first; those of the usual number of workers count.
        path: The PNG file.
    """
    usual = [row for row in rows if row.workers == cookbook.USUAL]
    panels = [group for _, group in cookbook.panels(cookbook.compared(usual))]
    columns = min(len(panels), 2 if len(panels) == 4 else 3)
    figure, places = panels_of(len(panels), columns, 5.2, 4.2)
    names: list[list[tuple[float, float, str]]] = []
    for place, ((dense, *others), axes) in enumerate(zip(panels, places, strict=True)):
        limit = recipes.limit(dense.workload)
        worst = min(max([3 * limit, *(1.2 * row.lost for row in others)]), 8 * limit)
        axes.axhspan(-2 * limit, limit, color="#e4f1ea", zorder=0, linewidth=0)
        axes.axhline(0, color=BASELINE_COLOUR, linewidth=0.8)
        for row in others:
            colour = COLOURS[2] if row.keeps else COLOURS[3]
            axes.plot(row.fewer_bytes, min(row.lost, worst), "o" if row.lost <= worst else "v", color=colour)
        log_axis(axes)
        axes.set_ylim(worst * 1.05, -2 * limit)
        axes.set_xlim(1, max(3000, *(2 * row.fewer_bytes for row in others)))
        axes.set_title(cookbook.title(dense.cell), loc="left", fontsize=10)
        lost = "% of the loss more" if recipes.by_loss(dense.workload) else "points lost"
        if place % columns == 0 or places[place - 1].get_ylabel() != lost:
            axes.set_ylabel(lost)
        if place + columns >= len(panels):
            axes.set_xlabel("times fewer bytes than dense (logarithmic)")
        names.append([(row.fewer_bytes, min(row.lost, worst), cookbook.short(row)) for row in others])
    for axes, named in zip(places, names, strict=True):
        label_points(figure, axes, named)
    save(figure, path)


def speedup_plot(rows: Sequence[Speedup], path: Path, title: str, subtitle: str) -> None:
    """Draws the loss against the steps of all workers together, and each worker's steps to the target.

    Args:
        rows: One for each number of workers.
        path: The PNG file.
        title: What was trained.
        subtitle: Where, in a line.
    """
    figure, ((left, right),) = figure_of((10, 4.8), 1, 2)
    titled(left, title, subtitle)
    for row, colour in zip(rows, COLOURS[2:] * len(rows), strict=False):
        totals, losses = [row.workers * steps for steps in row.losses], list(row.losses.values())
        reach = [[loss.mean - loss.least for loss in losses], [loss.most - loss.mean for loss in losses]]
        name = f"{row.workers} worker{'s' if row.workers > 1 else ''}"
        means = [loss.mean for loss in losses]
        left.errorbar(
            totals, means, reach, color=colour, marker="o", markersize=4, capsize=2, linewidth=1.5, label=name
        )
        if row.steps_to_target is not None:
            right.plot(row.workers, row.steps_to_target, "o", color=colour, markersize=9)
    log_axis(left)
    left.set_xlabel("steps of all workers together, M K (logarithmic)")
    left.set_ylabel("loss on held-out data in nats")
    left.legend(frameon=False, fontsize=9)
    reached = [row for row in rows if row.steps_to_target is not None]
    if reached:
        workers = [row.workers for row in reached]
        start = (reached[0].steps_to_target or 0.0) * reached[0].workers
        right.plot(
            workers, [start / each for each in workers], color=_INK, linewidth=0.8, linestyle=(0, (4, 4)), zorder=0
        )
        right.annotate(
            "linear speed-up", (workers[0], start / workers[0]), (12, -3), textcoords="offset points", fontsize=9
        )
        titled(right, f"Steps of a worker to a loss of {reached[0].target:.2f}")
    log_axis(right)
    log_axis(right, "y")
    right.set_xticks([row.workers for row in rows])
    right.set_xlabel("workers M (logarithmic)")
    right.set_ylabel("steps K (logarithmic)")
    save(figure, path)


def titled(axes: Axes, title: str, subtitle: str = "") -> None:
    """Writes a title, and a line below it that is smaller."""
    axes.set_title(title, loc="left", pad=26)
    axes.text(0, 1.03, subtitle, transform=axes.transAxes, fontsize=9, color="#666666")


def save(figure: Figure, path: Path) -> None:
    """Writes a picture, making the folder where needed.

    Raises:
        ConfigurationError: If the path cannot be written.
    """
    with origin.writing(path):
        figure.savefig(path, dpi=160, facecolor="white")


def label_points(figure: Figure, axes: Axes, points: Sequence[tuple[float, float, str]]) -> list[Annotation]:
    """Writes names beside points, each at the nearest height that is free of other names and other points.

    The axes are where they are from then on, as other places for names would ask for other axes.
    """
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.patheffects import withStroke

    notes = [
        axes.annotate(
            name,
            (x, y),
            (7, 0),
            textcoords="offset points",
            fontsize=8,
            va="center",
            path_effects=[withStroke(linewidth=2, foreground="white")],  # readable where it crosses a line
        )
        for x, y, name in sorted(points, key=lambda point: -point[1])
    ]
    if isinstance(figure.get_layout_engine(), ConstrainedLayoutEngine):  # else all axes are where they are already
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
    dots = axes.transData.transform([(x, y) for x, y, _ in points])
    taken: list[Bbox] = []
    for note in notes:
        level = note.get_window_extent()
        shift, box = next(
            (shift, box)
            for step in range(400)
            for shift in (_STEP * step, -_STEP * step)
            for box in [level.translated(0, shift)]
            if not box.padded(_RADIUS).count_contains(dots)
            and not box.padded(1).count_overlaps(taken)  # as letters may be drawn a pixel beside where they were asked
        )
        taken.append(box)
        beside = (7, shift * 72 / figure.dpi)
        note.set_position(beside)
        if abs(shift) > level.height:
            leader = {"arrowstyle": "-", "color": "#bbbbbb", "linewidth": 0.6}
            axes.annotate("", note.xy, beside, textcoords="offset points", arrowprops=leader)
    return notes


def _draw_accuracy_over_time(axes: Axes, rows: Sequence[TrainRow], colours: dict[str, str]) -> None:
    for row in rows:
        seconds, accuracy = [point.seconds for point in row.curve], [100 * point.accuracy for point in row.curve]
        axes.plot(seconds, accuracy, color=colours[row.label], linewidth=2, marker="o", markersize=3, label=row.label)
    log_axis(axes)
    axes.set_xlabel("training time in seconds (logarithmic)")
    axes.set_ylabel("test accuracy in %")
    target = 100 * rows[0].target_accuracy
    axes.axhline(target, color=_INK, linewidth=0.8, linestyle=(0, (4, 4)), zorder=0)
    axes.annotate(
        f"target {target:g} %", (0, target), (4, 4), ("axes fraction", "data"), textcoords="offset points", fontsize=9
    )
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(1.01, 1),
        frameon=False,
        fontsize=9,
        labelcolor="linecolor",
        ncols=-(-len(rows) // 20),
    )


def _draw_step_time(axes: Axes, rows: Sequence[TrainRow], colours: dict[str, str]) -> None:
    times = [row.median_seconds or 0.0 for row in rows]
    places = range(len(rows))
    axes.barh(places, times, color=[colours[row.label] for row in rows], height=0.65)
    for place, row, seconds in zip(places, rows, times, strict=True):
        gain = "" if row is rows[0] or row.speedup is None else f"   {row.speedup:.1f} x as fast"
        axes.text(seconds + max(times) / 80, place, f"{1e3 * seconds:.0f} ms{gain}", va="center")
    axes.set_yticks(places, [row.label for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, max(times) * 1.15)
    axes.set_xlabel("median seconds a step")


def _draw_accuracy_over_bytes(axes: Axes, rows: Sequence[TrainRow], colours: dict[str, str]) -> None:
    shown = [row for row in rows if row.sent_bytes]
    accuracies = [100 * (row.accuracy or 0.0) for row in shown]
    if not accuracies:  # one worker alone sends nothing
        return
    middle = (max(accuracies) + min(accuracies)) / 2
    for row, accuracy in zip(shown, accuracies, strict=True):
        megabytes = (row.sent_bytes or 0.0) / _MB
        axes.plot(megabytes, accuracy, "o", color=colours[row.label], markersize=10)
        above = accuracy >= middle
        axes.annotate(
            row.label,
            (megabytes, accuracy),
            (0, 8 if above else -8),
            textcoords="offset points",
            fontsize=9,
            ha="center",
            va="bottom" if above else "top",
        )
    log_axis(axes)
    axes.set_xlabel("MB a worker sends in a step (logarithmic)")
    axes.set_ylabel("test accuracy in %")
    axes.margins(x=0.15)
    reach = max(_LEAST_REACH, 0.7 * (max(accuracies) - min(accuracies)))
    axes.set_ylim(middle - reach, middle + reach)


def log_axis(axes: Axes, which: Literal["x", "y"] = "x") -> None:
    """A logarithmic axis with plain numbers at 1, 2 and 5."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    if which == "x":
        axes.set_xscale("log")
    else:
        axes.set_yscale("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def axes_of(inches: tuple[float, float] = (8, 4.8)) -> tuple[Figure, Axes]:
    """An empty picture with one pair of axes."""
    figure, ((axes,),) = figure_of(inches, 1, 1)
    return figure, axes


def panels_of(count: int, columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """So many panels of one size, in so many columns."""
    rows = -(-count // columns)
    figure, found = figure_of((width * columns, height * rows), rows, columns)
    flat = [axes for row in found for axes in row]
    for axes in flat[count:]:
        axes.remove()
    return figure, flat[:count]


def figure_of(inches: tuple[float, float], rows: int, columns: int) -> tuple[Figure, list[list[Axes]]]:
    """An empty picture with its axes, row by row.

    Raises:
        ConfigurationError: Without matplotlib.
    """
    require("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, layout="constrained")
    FigureCanvasAgg(figure)  # which measures letters with one renderer; without it each word gets a canvas of its own
    found = [list(row) for row in figure.subplots(rows, columns, squeeze=False)]
    for axes in (each for row in found for each in row):
        axes.tick_params(labelsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, found
