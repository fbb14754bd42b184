"""Pictures of a suite's records."""

from __future__ import annotations

import io
import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gradwire_bench.cell import Cell, Record
from gradwire_bench.contenders import Contender
from gradwire_bench.launch import link_rate
from gradwire_bench.pictures import BASELINE_COLOUR, COLOURS, figure_of, label_points, log_axis, panels_of
from gradwire_bench.suite.measures import MEASURES
from gradwire_bench.suite.tables import by_seed, dense, labels, mean, phase
from gradwire_bench.suite.targets import LEAST_POINTS
from gradwire_bench.workloads import WORKLOADS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

_PHASES = {"forward": "#9ecae1", "backward": "#4292c6", "waiting": "#D55E00", "update": "#08519c"}
_STAGES = {"encode": "#009E73", "wire": "#8f8f8f", "decode": "#B8A800", "idle": "#e6e6e6"}
_COLUMNS = 3
_ATTRIBUTE = re.compile(r'="[^"]*"')
_LONG = re.compile(r"(?<![\w.#-])-?\d+\.\d{3,}")
"""Numbers of a picture's attributes, whose thousandths of a point nobody sees."""
_UNUSED = re.compile(r"""\n +| id="[a-z0-9.]+_\d+"| transform="rotate\(-0 [^)]*\)"|; font-family: [^;"]*""")
"""Of a picture: indents, names that nothing refers to, turns by nothing, and the font, which is the page's."""


class Style(NamedTuple):
    """Of a contender's line."""

    colour: str
    dash: str


@dataclass(frozen=True)
class Plot:
    """A picture.

    Attributes:
        title: What it shows.
        about: How to read it, in a sentence or two.
        svg: The picture.
    """

    title: str
    about: str
    svg: str


def plots(records: Sequence[Record]) -> Iterator[Plot]:
    """All that the records are enough for."""
    done = [each for each in records if not each.error]
    styles = _styles([each for each in done if each.cell.races])
    made: tuple[tuple[str, Callable[[Sequence[Record], dict[str, Style]], Figure], str, str], ...] = (
        (
            "train",
            _overview,
            "How many times as fast a step is",
            "As DDP fp32 on the same task, link and workers: medians, mean over seeds. Red is slower, grey was not "
            "measured.",
        ),
        (
            "trial",
            _quality_against_bytes,
            "Quality against bytes",
            "Points of quality above dense averages, mean and range over seeds, against how many times fewer bytes a "
            "worker sends. The grey band is the range of dense averages' own seeds.",
        ),
        (
            "train",
            _breakdown,
            "Where a step's time goes",
            "Above, the training thread; waiting is what backward takes beyond that of the quickest contender. Below, "
            "thin, the wire thread, which works at the same time.",
        ),
        (
            "train",
            _curves,
            "Quality by steps, seconds and bytes",
            "The same trainings against three costs: means over seeds, on the left with their range; quality on a "
            f"part of the held-out data. Trainings with fewer than {LEAST_POINTS} points are left out.",
        ),
        (
            "sync",
            _bandwidth,
            "Speed-up against bandwidth",
            "Averages alone: how many times faster than DDP fp32 on the same link.",
        ),
        (
            "codec",
            _size_against_error,
            "Size against error",
            "One gradient late in the recorded training, without a memory. Filled: one segment for the model, else by "
            "layer. Lower left is better.",
        ),
    )
    for kind, draw, title, about in made:
        chosen = [each for each in done if each.cell.kind == kind]
        if draw is _curves:
            chosen = [each for each in chosen if len(each.result["curve"]) >= LEAST_POINTS]
        raced = draw not in (_overview, _bandwidth) or not all(each.cell.is_baseline for each in chosen)
        if chosen and raced:
            yield Plot(title, about, svg(draw(chosen, styles)))


def svg(figure: Figure) -> str:
    """A figure as SVG, its letters as text, the same bytes for the same figure."""
    import matplotlib as mpl

    for text in (text for axes in figure.axes for text in axes.texts):
        text.set_path_effects([])  # which would make shapes of letters; the page's style has them stand out instead
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "gradwire", "font.family": "sans-serif"}):
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None}, facecolor="white")
    return _ATTRIBUTE.sub(_rounded, _UNUSED.sub("", out.getvalue()))


def _rounded(attribute: re.Match[str]) -> str:
    return _LONG.sub(lambda found: f"{float(found[0]):.2f}".rstrip("0").rstrip("."), attribute[0])


def _short(name: str) -> str:
    """A contender in few letters: without the names of its options."""
    return " ".join(part.partition("=")[2] or part for part in name.split())


def _wide_log_axis(axes: Axes) -> None:
    """Powers of ten alone where there are many."""
    from matplotlib.ticker import LogLocator

    log_axis(axes)
    low, high = axes.get_xlim()
    if high > 300 * low:
        axes.xaxis.set_major_locator(LogLocator())


def _apart(figure: Figure) -> None:
    """Leaves room between one row and the next."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure.set_layout_engine(ConstrainedLayoutEngine(h_pad=0.12))


def _grid(count: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    figure, panels = panels_of(count, min(count, _COLUMNS), width, height)
    _apart(figure)
    return figure, panels


def _quality_against_bytes(records: Sequence[Record], styles: dict[str, Style]) -> Figure:
    groups, names = by_seed(records), labels(records)
    places = list(dict.fromkeys((group[0].cell.workload, group[0].cell.optimizer) for group in groups))
    figure, panels = _grid(len(places), 4.8, 3.8)
    points: list[list[tuple[float, float, str]]] = []
    for (workload, optimizer), axes in zip(places, panels, strict=True):
        here = [g for g in groups if (g[0].cell.workload, g[0].cell.optimizer) == (workload, optimizer)]
        axes.set_title(f"{WORKLOADS[workload].what}, {optimizer}", loc="left", fontsize=10, pad=14)
        named: list[tuple[float, float, str]] = []
        baseline = next((group for group in here if group[0].cell.is_baseline), [])
        zero = mean(baseline, "quality") or 0.0
        if baseline:
            values = [100 * (each.result["accuracy"] - zero) for each in baseline]
            axes.axhspan(min(values), max(values), color="#e8e8e8", linewidth=0, zorder=0)
        axes.axhline(0, color=BASELINE_COLOUR, linewidth=0.8)
        for group in here:
            fewer, values = mean(group, "fewer_bytes"), [100 * (each.result["accuracy"] - zero) for each in group]
            if fewer is None or group[0].cell.is_baseline:
                continue
            middle, colour = statistics.fmean(values), styles[_line(group[0].cell)].colour
            reach = [[middle - min(values)], [max(values) - middle]]
            axes.errorbar(fewer, middle, reach, fmt="o", color=colour, markersize=6, capsize=2)
            named.append((fewer, middle, _short(names[group[0].cell])))
        _wide_log_axis(axes)
        axes.margins(x=0.4, y=0.15)
        points.append(named)
    for axes in panels:
        axes.set_xlabel("times fewer bytes than dense (logarithmic)", fontsize=9)
    panels[0].set_ylabel("points above dense averages", fontsize=9)
    for axes, named in zip(panels, points, strict=True):
        label_points(figure, axes, named)
    return figure


def _overview(records: Sequence[Record], styles: dict[str, Style]) -> Figure:
    from matplotlib.colors import LinearSegmentedColormap

    groups, names = by_seed(records), labels(records)
    places = list(dict.fromkeys(map(_place, groups)))
    rows = list(dict.fromkeys(names[group[0].cell] for group in groups if not group[0].cell.is_baseline))
    found: dict[tuple[int, int], float] = {}
    for group in groups:
        baseline, own = mean(dense(groups, group[0].cell), "seconds"), mean(group, "seconds")
        if baseline and own and not group[0].cell.is_baseline:
            found[rows.index(names[group[0].cell]), places.index(_place(group))] = baseline / own
    figure, [[axes]] = figure_of((2.6 + 1.05 * len(places), 1.1 + 0.34 * len(rows)), 1, 1)
    reach = max([math.log2(3), *(abs(math.log2(each)) for each in found.values())])
    colours = LinearSegmentedColormap.from_list("times", ("#ee9a6a", "#ffffff", "#62c4a4"))
    values = [[found.get((row, place), math.nan) for place in range(len(places))] for row in range(len(rows))]
    axes.set_facecolor("#eeeeee")
    shown = np.ma.masked_invalid(np.log2(values))
    axes.pcolormesh(shown, cmap=colours, vmin=-reach, vmax=reach, edgecolors="white", linewidth=2)
    for (row, place), times in found.items():
        text = f"{times:.2f}" if times < 10 else f"{times:.0f}"
        axes.annotate(text, (place + 0.5, row + 0.5), ha="center", va="center", fontsize=9)
    axes.set_xticks([place + 0.5 for place in range(len(places))], ["\n".join(place) for place in places])
    axes.set_yticks([row + 0.5 for row in range(len(rows))], rows)
    axes.invert_yaxis()
    axes.tick_params(length=0, labelsize=8, top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.spines[:].set_visible(False)
    return figure


def _breakdown(records: Sequence[Record], styles: dict[str, Style]) -> Figure:
    groups, names = by_seed(records), labels(records)
    places = list(dict.fromkeys(map(_place, groups)))
    most = max(sum(_place(group) == place for group in groups) for place in places)
    figure, panels = _grid(len(places), 4.8, max(0.6 + 0.36 * most, 2.6))
    for place, axes in zip(places, panels, strict=True):
        here = [group for group in groups if _place(group) == place]
        least = min(_phase(group, "backward") for group in here)
        axes.set_title(", ".join(place), loc="left", fontsize=10)
        for row, group in enumerate(here):
            parts = {
                "forward": _phase(group, "forward"),
                "backward": least,
                "waiting": _phase(group, "backward") - least,
                "update": _phase(group, "update"),
            }
            _bar(axes, row - 0.12, 0.5, parts, _PHASES)
            _bar(axes, row + 0.27, 0.16, {stage: _phase(group, stage) for stage in _STAGES}, _STAGES)
        axes.set_yticks(range(len(here)), [names[group[0].cell] for group in here], fontsize=8)
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.set_xlabel("ms a step", fontsize=9)
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=name) for name, colour in (_PHASES | _STAGES).items()]
    columns = len(handles) if len(places) > 1 else 4
    figure.legend(handles=handles, ncols=columns, frameon=False, fontsize=9, loc="outside upper left")
    return figure


def _bar(axes: Axes, place: float, height: float, parts: dict[str, float], colours: dict[str, str]) -> None:
    shown = {name: 1e3 * seconds for name, seconds in parts.items() if seconds > 0}
    *lefts, _ = accumulate(shown.values(), initial=0.0)
    if shown:
        axes.barh([place] * len(shown), [*shown.values()], height, lefts, color=[colours[name] for name in shown])


def _place(group: Sequence[Record]) -> tuple[str, ...]:
    """Where contenders race one another, in words."""
    cell = group[0].cell
    return WORKLOADS[cell.workload].what, cell.link, f"{cell.workers} workers", *cell.unusual


def _phase(group: Sequence[Record], name: str) -> float:
    return statistics.fmean(phase(each, name) or 0.0 for each in group)


def _curves(records: Sequence[Record], styles: dict[str, Style]) -> Figure:
    from matplotlib.ticker import MaxNLocator

    names = labels(records)
    places = list(dict.fromkeys(_place([each]) for each in records))
    figure, rows = figure_of((4.8 * 3, 3.6 * len(places)), len(places), 3)
    _apart(figure)
    lines: dict[str, Line2D] = {}
    for place, panels in zip(places, rows, strict=True):
        here = [group for group in by_seed(records) if _place(group) == place]
        measure = WORKLOADS[here[0][0].cell.workload].measure
        panels[0].set_title(f"{', '.join(place)}: {measure} in %", loc="left", fontsize=10)
        for group in here:
            style = styles[_line(group[0].cell)]
            points = list(zip(*(each.result["curve"] for each in group), strict=False))
            steps = [of_seeds[0]["step"] for of_seeds in points]
            seconds = [statistics.fmean(each["seconds"] for each in of_seeds) for of_seeds in points]
            qualities = [[100 * each["accuracy"] for each in of_seeds] for of_seeds in points]
            sent = mean(group, "bytes")
            megabytes = [1e-6 * sent * step for step in steps] if sent else []
            for axes, xs in zip(panels, (steps, seconds, megabytes), strict=True):
                if xs:
                    middle = [statistics.fmean(each) for each in qualities]
                    lines[names[group[0].cell]] = axes.plot(xs, middle, style.dash, color=style.colour)[0]
            if len(group) > 1:
                reach = [min(each) for each in qualities], [max(each) for each in qualities]
                panels[0].fill_between(steps, *reach, color=style.colour, alpha=0.12, linewidth=0)
        for axes in panels:
            if (target := mean(here[0], "target")) is not None:
                axes.axhline(100 * target, color="#bbbbbb", linewidth=0.8, zorder=0)
                axes.annotate("target", (1, 100 * target), xycoords=("axes fraction", "data"), fontsize=7, ha="right")
        for axes, name in zip(panels, ("steps", "seconds (logarithmic)", "MB sent (logarithmic)"), strict=True):
            axes.set_xlabel(name, fontsize=9)
        panels[0].xaxis.set_major_locator(MaxNLocator(integer=True))
        log_axis(panels[1])
        log_axis(panels[2])
    figure.legend([*lines.values()], [*lines], ncols=5, frameon=False, fontsize=9, loc="outside upper left")
    return figure


def _bandwidth(records: Sequence[Record], styles: dict[str, Style]) -> Figure:
    groups, names = by_seed(records), labels(records)
    places = list(dict.fromkeys((group[0].cell.workload, group[0].cell.workers) for group in groups))
    figure, panels = _grid(len(places), 8.0, 4.6)
    for (shapes, workers), axes in zip(places, panels, strict=True):
        here = [g for g in groups if (g[0].cell.workload, g[0].cell.workers) == (shapes, workers)]
        lines: dict[str, list[tuple[float, float]]] = {}
        for group in here:
            rate, baseline = link_rate(group[0].cell.link), mean(dense(groups, group[0].cell), "seconds")
            own = mean(group, "seconds")
            if rate and baseline and own and not group[0].cell.is_baseline:
                lines.setdefault(names[group[0].cell], []).append((rate / 1e6, baseline / own))
        for name, line in lines.items():
            style = styles[next(_line(g[0].cell) for g in here if names[g[0].cell] == name)]
            axes.plot(*zip(*sorted(line), strict=True), style.dash, color=style.colour, marker="o", label=name)
        axes.axhline(1, color=BASELINE_COLOUR, linewidth=0.8)
        axes.set_title(f"{shapes}, {workers} workers", loc="left", fontsize=10)
        log_axis(axes)
        log_axis(axes, "y")
        axes.set_xlabel("Mbit/s of each worker's link (logarithmic)")
        axes.set_ylabel("times as fast as DDP fp32 (logarithmic)")
        axes.legend(frameon=False, fontsize=9, bbox_to_anchor=(1.01, 1), loc="upper left")
    return figure


def _size_against_error(records: Sequence[Record], styles: dict[str, Style]) -> Figure:
    workloads = list(dict.fromkeys(each.cell.workload for each in records))
    figure, panels = _grid(len(workloads), 6.4, 5.0)
    points: list[list[tuple[float, float, str]]] = []
    for workload, axes in zip(workloads, panels, strict=True):
        own = [each for each in records if each.cell.workload == workload]
        last = max(each.cell.steps for each in own)
        named: list[tuple[float, float, str]] = []
        for each in (record for record in own if record.cell.steps == last):
            bits, error = MEASURES["bits"].of(each), MEASURES["error"].of(each)
            if not bits or not error:
                continue
            colour = styles[_line(each.cell)].colour
            face = colour if each.cell.granularity == "model" else "white"
            axes.plot(bits, error, "o", color=colour, markerfacecolor=face, markersize=6)
            if each.cell.granularity != "model":
                named.append((bits, error, _short(Contender.parse(each.cell.method).label)))
        axes.set_title(f"{WORKLOADS[workload].what}, {last} steps in", loc="left", fontsize=10)
        axes.set_yscale("log")
        _wide_log_axis(axes)
        axes.margins(0.12)
        axes.set_xlabel("bits a value (logarithmic)")
        points.append(named)
    panels[0].set_ylabel("squared error, as a share (logarithmic)")
    for axes, named in zip(panels, points, strict=True):
        label_points(figure, axes, named)
    return figure


BASELINES = ("ddp", "bf16", "torch-fp16", "torch-powersgd")
"""Grey, so that what is compared with them stands out."""


def _styles(records: Sequence[Record]) -> dict[str, Style]:
    """How each contender's line looks, the same in all pictures: a colour and a dash, grey for baselines."""
    lines = {_line(each.cell): each.cell.method for each in records}
    grey = [each for each, method in lines.items() if Contender.parse(method).name in BASELINES]
    others = [each for each in lines if each not in grey]
    dashes = ("-", "--", ":", "-.")
    styles = {each: Style(BASELINE_COLOUR, dashes[place % len(dashes)]) for place, each in enumerate(grey)}
    for place, each in enumerate(others):
        styles[each] = Style(COLOURS[place % len(COLOURS)], dashes[place // len(COLOURS) % len(dashes)])
    return styles


def _line(cell: Cell) -> str:
    """What has a line, and a style, of its own: a method on a route."""
    return f"{cell.method} {cell.route}"
