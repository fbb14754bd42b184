"""What ``gradwire bench gpu`` found, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gradwire_bench.cell import Record
from gradwire_bench.pictures import BASELINE_COLOUR, COLOURS, figure_of, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(records: Sequence[Record], path: Path) -> None:
    """Draws what the kernels reach of a copy's bandwidth, and when each stream was busy in a step.

    Raises:
        ConfigurationError: Without matplotlib.
    """
    speeds = [each for each in records if each.result.get("target") and "of_copy" in each.result]
    speeds = [each for each in speeds if each.cell.workload == speeds[0].cell.workload]
    steps = [each for each in records if each.result.get("streams")]
    heights = [1 + len(speeds) / 7, *[1.4 for _ in steps]]
    figure, rows = figure_of((10, sum(heights)), len(heights), 1)
    if grid := rows[0][0].get_gridspec():
        grid.set_height_ratios(heights)
    _bars(rows[0][0], speeds)
    for (axes,), record in zip(rows[1:], steps, strict=True):
        _streams(axes, record)
    save(figure, path)


def _bars(axes: Axes, speeds: Sequence[Record]) -> None:
    for place, record in enumerate(speeds):
        colour = COLOURS[2] if record.result["reached"] else COLOURS[3]
        axes.barh(-place, 100 * record.result["of_copy"], color=colour, height=0.7)
        axes.plot([100 * record.result["target"]], [-place], "|", color="#222222", markersize=9)
    axes.set_yticks([-place for place in range(len(speeds))], [each.cell.method for each in speeds], fontsize=7)
    axes.set_xlabel("% of a copy's bandwidth; the mark is the target")
    if speeds:
        numel = int(speeds[0].cell.workload.partition(":")[2])
        axes.set_title(f"{speeds[0].machine['gpu']}, {numel / 1e6:g} M values", loc="left", fontsize=10)


def _streams(axes: Axes, record: Record) -> None:
    streams = record.result["streams"]
    for place, spans in enumerate(streams.values()):
        colour = BASELINE_COLOUR if place == 0 else COLOURS[place % len(COLOURS)]
        axes.broken_barh([(begin, end - begin) for begin, end in spans], (place - 0.4, 0.8), color=colour)
    axes.set_yticks(range(len(streams)), [f"stream {stream}" for stream in streams], fontsize=7)
    axes.set_xlabel(f"ms of a step of {record.cell.workload.partition(':')[2]} with {record.cell.method}", fontsize=8)
