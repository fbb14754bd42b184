"""Pictures of a suite's records."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from gradwire.methods.families import FAMILIES, family_of
from gradwire_bench.contenders import DDP, Contender
from gradwire_bench.pictures import BASELINE_COLOUR, COLOURS, figure_of, label_points, log_axis
from gradwire_bench.suite.cell import Record
from gradwire_bench.suite.claims import Finding
from gradwire_bench.suite.measures import MEASURES
from gradwire_bench.suite.tables import by_seed, dense, labels, mean
from gradwire_bench.sync import link_rate
from gradwire_bench.workloads import WORKLOADS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PHASES = {"forward": "#9ecae1", "backward": "#4292c6", "waiting": "#D55E00", "update": "#08519c"}
_STAGES = {"encode": "#009E73", "wire": "#bdbdbd", "decode": "#B8A800"}
_VERDICTS = {"holds": "#009E73", "does not hold": "#D55E00", "cannot tell": "#8a8a8a"}
_COLUMNS = 3


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
    made: tuple[tuple[str, Callable[[Sequence[Record]], Figure], str, str], ...] = (
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
            "The same trainings against three costs; quality on a part of the held-out data.",
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
        if chosen:
            yield Plot(title, about, svg(draw(chosen)))


def verdicts(found: Sequence[Finding], path: Path) -> None:
    """Draws the interval of each claim's difference or factor, a panel for each kind of figure.

    Args:
        found: What was found; claims without an interval are left out.
        path: The PNG file.
    """
    places = list(
        dict.fromkeys((each.claim.measure, each.claim.relation == "times") for each in found if each.interval)
    )
    if not places:
        return
    panels = [
        [each for each in found if each.interval and (each.claim.measure, each.claim.relation == "times") == place]
        for place in places
    ]
    figure, axes = figure_of((10, 0.9 + 0.42 * sum(map(len, panels)) + 0.7 * len(panels)), len(panels), 1)
    for ((measure, factor), here), (panel,) in zip(zip(places, panels, strict=True), axes, strict=True):
        for row, each in enumerate(here):
            low, middle, high = each.interval or (0.0, 0.0, 0.0)
            colour = _VERDICTS[each.verdict]
            panel.errorbar(middle, row, xerr=[[middle - low], [high - middle]], fmt="o", color=colour, capsize=3)
            if each.claim.relation == "equal":
                panel.barh(row, 2 * each.claim.margin, 0.6, -each.claim.margin, color="#eeeeee", zorder=0)
            if factor:
                panel.plot([each.claim.margin] * 2, [row - 0.3, row + 0.3], color=BASELINE_COLOUR)
        panel.axvline(1.0 if factor else 0.0, color=BASELINE_COLOUR, linewidth=0.8)
        if factor:
            log_axis(panel)
        panel.set_yticks(range(len(here)), ["\n".join(wrap(each.claim.text, 52)) for each in here], fontsize=8)
        panel.tick_params(axis="y", length=0)
        panel.set_ylim(len(here) - 0.5, -0.5)
        unit = "times better (logarithmic); bar: as claimed" if factor else MEASURES[measure].unit
        panel.set_xlabel(f"{MEASURES[measure].title}: {unit}", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, facecolor="white")


def svg(figure: Figure) -> str:
    """A figure as SVG, its letters as text, the same bytes for the same figure."""
    import matplotlib as mpl
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_path_effects([])  # which would make shapes of letters; the page's style has them stand out instead
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "gradwire", "font.family": "sans-serif"}):
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None}, facecolor="white")
    return out.getvalue()


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


def _grid(count: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    columns = min(count, _COLUMNS)
    rows = -(-count // columns)
    figure, axes = figure_of((width * columns, height * rows), rows, columns)
    flat = [each for row in axes for each in row]
    for each in flat[count:]:
        each.remove()
    return figure, flat[:count]


def _quality_against_bytes(records: Sequence[Record]) -> Figure:
    groups, names = by_seed(records), labels(records)
    places = list(dict.fromkeys((group[0].cell.workload, group[0].cell.optimizer) for group in groups))
    figure, panels = _grid(len(places), 4.8, 3.8)
    points: list[list[tuple[float, float, str]]] = []
    for (workload, optimizer), axes in zip(places, panels, strict=True):
        here = [g for g in groups if (g[0].cell.workload, g[0].cell.optimizer) == (workload, optimizer)]
        axes.set_title(f"{WORKLOADS[workload].what}, {optimizer}", loc="left", fontsize=10, pad=14)
        named: list[tuple[float, float, str]] = []
        baseline = next((group for group in here if group[0].cell.method == DDP), [])
        zero = mean(baseline, "quality") or 0.0
        if baseline:
            values = [100 * (each.result["accuracy"] - zero) for each in baseline]
            axes.axhspan(min(values), max(values), color="#e8e8e8", linewidth=0, zorder=0)
        axes.axhline(0, color=BASELINE_COLOUR, linewidth=0.8)
        for group in here:
            fewer, values = mean(group, "fewer_bytes"), [100 * (each.result["accuracy"] - zero) for each in group]
            if fewer is None or group[0].cell.method == DDP:
                continue
            middle = sum(values) / len(values)
            reach = [[middle - min(values)], [max(values) - middle]]
            axes.errorbar(fewer, middle, reach, fmt="o", color=_colour(group[0].cell.method), markersize=6, capsize=2)
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


def _breakdown(records: Sequence[Record]) -> Figure:
    groups, names = by_seed(records), labels(records)
    places = list(dict.fromkeys((g[0].cell.workload, g[0].cell.link, g[0].cell.workers) for g in groups))
    most = max(sum(_place(group) == place for group in groups) for place in places)
    figure, panels = _grid(len(places), 4.8, 0.6 + 0.36 * most)
    for place, axes in zip(places, panels, strict=True):
        here = [group for group in groups if _place(group) == place]
        least = min(_phase(group, "backward") for group in here)
        axes.set_title(f"{WORKLOADS[place[0]].what}, {place[1]}, {place[2]} workers", loc="left", fontsize=10)
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
    figure.legend(handles=handles, ncols=len(handles), frameon=False, fontsize=9, loc="outside upper left")
    return figure


def _bar(axes: Axes, place: float, height: float, parts: dict[str, float], colours: dict[str, str]) -> None:
    left = 0.0
    for name, seconds in parts.items():
        axes.barh(place, 1e3 * seconds, height, left, color=colours[name])
        left += 1e3 * seconds


def _place(group: Sequence[Record]) -> tuple[str, str, int]:
    cell = group[0].cell
    return cell.workload, cell.link, cell.workers


def _phase(group: Sequence[Record], name: str) -> float:
    return statistics.fmean(each.result["phases"].get(name, 0.0) for each in group)


def _curves(records: Sequence[Record]) -> Figure:
    names = labels(records)
    places = list(dict.fromkeys(_place([each]) for each in records))
    figure, rows = figure_of((4.8 * 3, 3.6 * len(places)), len(places), 3)
    for place, panels in zip(places, rows, strict=True):
        here = [group for group in by_seed(records) if _place(group) == place]
        measure = WORKLOADS[place[0]].measure
        panels[0].set_title(f"{WORKLOADS[place[0]].what}, {place[1]}: {measure} in %", loc="left", fontsize=10)
        for group, style in zip(here, _styles(here), strict=True):
            curve, sent = group[0].result["curve"], mean(group, "bytes")
            quality = [100 * point["accuracy"] for point in curve]
            for axes, xs in (
                (panels[0], [point["step"] for point in curve]),
                (panels[1], [point["seconds"] for point in curve]),
                (panels[2], [1e-6 * (sent or 0.0) * point["step"] for point in curve]),
            ):
                if sent or axes is not panels[2]:
                    axes.plot(xs, quality, linewidth=1.6, marker=".", label=names[group[0].cell], **style)
        for axes, name in zip(panels, ("steps", "seconds (logarithmic)", "MB sent (logarithmic)"), strict=True):
            axes.set_xlabel(name, fontsize=9)
        log_axis(panels[1])
        log_axis(panels[2])
    handles, lines = rows[0][0].get_legend_handles_labels()
    figure.legend(handles, lines, ncols=5, frameon=False, fontsize=9, loc="outside upper left")
    return figure


def _bandwidth(records: Sequence[Record]) -> Figure:
    groups, names = by_seed(records), labels(records)
    places = list(dict.fromkeys((group[0].cell.workload, group[0].cell.workers) for group in groups))
    figure, panels = _grid(len(places), 8.0, 4.6)
    for (shapes, workers), axes in zip(places, panels, strict=True):
        here = [g for g in groups if (g[0].cell.workload, g[0].cell.workers) == (shapes, workers)]
        lines: dict[str, list[tuple[float, float]]] = {}
        for group in here:
            rate, baseline = link_rate(group[0].cell.link), mean(dense(groups, group[0].cell), "seconds")
            own = mean(group, "seconds")
            if rate and baseline and own and group[0].cell.method != DDP:
                lines.setdefault(names[group[0].cell], []).append((rate / 1e6, baseline / own))
        firsts = [next(g for g in here if names[g[0].cell] == name) for name in lines]
        for (name, line), style in zip(lines.items(), _styles(firsts), strict=True):
            axes.plot(*zip(*sorted(line), strict=True), marker="o", linewidth=1.8, label=name, **style)
        axes.axhline(1, color=BASELINE_COLOUR, linewidth=0.8)
        axes.set_title(f"{shapes}, {workers} workers", loc="left", fontsize=10)
        log_axis(axes)
        log_axis(axes, "y")
        axes.set_xlabel("Mbit/s of each worker's link (logarithmic)")
        axes.set_ylabel("times as fast as DDP fp32 (logarithmic)")
        axes.legend(frameon=False, fontsize=9, bbox_to_anchor=(1.01, 1), loc="upper left")
    return figure


def _size_against_error(records: Sequence[Record]) -> Figure:
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
            colour = _colour(each.cell.method)
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


def _colour(method: str) -> str:
    """One for each family; grey for what is not compressed or not ours."""
    contender = Contender.parse(method)
    if not contender.is_ours:
        return BASELINE_COLOUR
    return COLOURS[list(FAMILIES).index(family_of(contender.name)) % len(COLOURS)]


def _styles(groups: Sequence[Sequence[Record]]) -> list[dict[str, Any]]:
    """A colour and a dash for each line: grey for what is not ours, one colour after another for the rest."""
    styles: list[dict[str, Any]] = []
    dashes = ("-", "--", ":", "-.")
    ours, others = 0, 0
    for group in groups:
        if _colour(group[0].cell.method) == BASELINE_COLOUR:
            styles.append({"color": BASELINE_COLOUR, "linestyle": dashes[others % len(dashes)]})
            others += 1
        else:
            styles.append({"color": COLOURS[ours % len(COLOURS)], "linestyle": dashes[ours // len(COLOURS)]})
            ours += 1
    return styles
