"""What a benchmark leaves: tables for the terminal, pictures, and a JSON that says where it was measured."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from gradwire.bench.sync import SyncRow
from gradwire.bench.train import TrainRow
from gradwire.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gradwire.bench.kernels import Row as KernelRow

_MB = 1e6
_NOTHING = "-"

# Okabe and Ito's palette, which people with any colour vision can tell apart; grey is for the baseline.
_BASELINE_COLOUR = "#5f5f5f"
_COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#0072B2", "#B8A800")
_INK = "#222222"
_LEAST_REACH = 3.0
"""Percentage points above and below the middle that an accuracy axis shows at least, lest chance look like a gap."""


def machine() -> dict[str, Any]:
    """The machine and the software that a number was measured on."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in ("gradwire", "torch", "numpy", "numba")},
    }


def document(kind: str, **content: Any) -> dict[str, Any]:
    """The envelope of every JSON that gradwire writes.

    Args:
        kind: What the document holds, such as ``"bench.sync"``.
        **content: The document's own fields; dataclasses become objects, their properties included.
    """
    return {
        "schema": f"gradwire.{kind}/1",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["gradwire", *sys.argv[1:]]),
        "machine": machine(),
        **{field: _plain(value) for field, value in content.items()},
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a document, making the folder where needed.

    Raises:
        ConfigurationError: If the path cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}; choose another path") from error


def machine_line() -> str:
    """The machine in one line, for under a table."""
    facts = machine()
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, {facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']:g} GiB, "
        f"torch {facts['torch']}"
    )


def sync_table(rows: Sequence[SyncRow], title: str) -> Table:
    """Seconds a step, ratio to DDP fp32 and bytes, of the rows of one link."""
    table = _table(title, "method", "s a step", "x DDP fp32", "target", "MB metered", "MB interface", "steps")
    for row in rows:
        table.add_row(
            _name(row.label, row.error),
            _number(row.median_seconds, "{:.3f}"),
            _number(row.ratio_to_ddp, "{:.2f}"),
            _targets(row),
            _number(row.metered_bytes, "{:.2f}", _MB),
            _number(row.interface_bytes, "{:.2f}", _MB),
            str(len(row.seconds) or row.steps_begun or _NOTHING),
        )
    return table


def train_table(rows: Sequence[TrainRow], title: str) -> Table:
    """Step time, bytes and accuracy of each contender."""
    target = f"s to {rows[0].target_accuracy:.0%}" if rows else "s to target"
    table = _table(
        title, "method", "ms a step", "x DDP fp32", "MB metered", "MB interface", "x fewer bytes", "accuracy", target
    )
    for row in rows:
        table.add_row(
            _name(row.label, row.error),
            _number(row.median_seconds, "{:.0f}", 1e-3),
            _number(row.speedup, "{:.2f}"),
            _number(row.metered_bytes, "{:.3f}", _MB),
            _number(row.interface_bytes, "{:.3f}", _MB),
            _number(row.ratio, "{:.1f}"),
            _number(row.accuracy, "{:.1%}"),
            "not reached"
            if row.accuracy and row.seconds_to_target is None
            else _number(row.seconds_to_target, "{:.1f}"),
        )
    return table


def kernels_table(rows: Sequence[KernelRow], title: str) -> Table:
    """Time of each inner loop, as a multiple of a copy too."""
    table = _table(title, "operation", "ms", "x copy", "target", "GB/s", "extra MB")
    for row in rows:
        target = Text()
        if row.target is not None:
            target = _verdict(f"<= {row.target:g}", reached=row.times_copy <= row.target)
        table.add_row(
            Text(row.operation),
            _number(row.milliseconds, "{:.1f}"),
            _number(row.times_copy, "{:.2f}"),
            target,
            _number(row.gigabytes_per_second, "{:.2f}"),
            _number(row.peak_extra_bytes, "{:.1f}", _MB),
        )
    return table


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
    colours = {row.label: colour for row, colour in zip(done, (_BASELINE_COLOUR, *_COLOURS * len(done)), strict=False)}
    pictures: list[tuple[str, Callable[[Axes, Sequence[TrainRow], dict[str, str]], None]]] = [
        ("accuracy_over_time.png", _draw_accuracy_over_time),
        ("step_time.png", _draw_step_time),
        ("accuracy_over_bytes.png", _draw_accuracy_over_bytes),
    ]
    paths = []
    for name, draw in pictures:
        figure, axes = _figure()
        draw(axes, done, colours)
        axes.text(0, 1.03, subtitle, transform=axes.transAxes, fontsize=9, color="#666666")
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / name, dpi=160, facecolor="white")
        paths.append(folder / name)
    return paths


def _draw_accuracy_over_time(axes: Axes, rows: Sequence[TrainRow], colours: dict[str, str]) -> None:
    axes.set_title("Test accuracy against training time", loc="left", pad=26)
    for row in rows:
        seconds, accuracy = [point.seconds for point in row.curve], [100 * point.accuracy for point in row.curve]
        axes.plot(seconds, accuracy, color=colours[row.label], linewidth=2, marker="o", markersize=3)
    _log_axis(axes)
    axes.set_xlabel("training time in seconds (logarithmic)")
    axes.set_ylabel("test accuracy in %")
    target = 100 * rows[0].target_accuracy
    axes.axhline(target, color=_INK, linewidth=0.8, linestyle=(0, (4, 4)), zorder=0)
    axes.annotate(
        f"target {target:g} %", (0, target), (4, 4), ("axes fraction", "data"), textcoords="offset points", fontsize=9
    )
    low, high = axes.get_ylim()
    gap = (high - low) / 20
    for cluster in _clusters(rows):
        right = max(row.curve[-1].seconds for row in cluster)
        heights = _stacked([100 * row.curve[-1].accuracy for row in cluster], gap)
        high = max(high, *(height + gap for height in heights))
        for row, height in zip(cluster, heights, strict=True):
            axes.text(right * 1.07, height, row.label, color=colours[row.label], fontsize=9, va="center")
    axes.set_ylim(low, high)


def _clusters(rows: Sequence[TrainRow]) -> list[list[TrainRow]]:
    """Rows that end at about the same time, and so need their labels stacked."""
    clusters: list[list[TrainRow]] = []
    for row in sorted(rows, key=lambda row: row.curve[-1].seconds):
        if clusters and row.curve[-1].seconds < 1.5 * clusters[-1][0].curve[-1].seconds:
            clusters[-1].append(row)
        else:
            clusters.append([row])
    return clusters


def _draw_step_time(axes: Axes, rows: Sequence[TrainRow], colours: dict[str, str]) -> None:
    axes.set_title("Time of a training step", loc="left", pad=26)
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
    axes.set_title("Final test accuracy against bytes sent", loc="left", pad=26)
    shown = [row for row in rows if row.sent_bytes]
    accuracies = [100 * (row.accuracy or 0.0) for row in shown]
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
    _log_axis(axes)
    axes.set_xlabel("MB a worker sends in a step (logarithmic)")
    axes.set_ylabel("test accuracy in %")
    axes.margins(x=0.15)
    reach = max(_LEAST_REACH, 0.7 * (max(accuracies) - min(accuracies)))
    axes.set_ylim(middle - reach, middle + reach)


def _log_axis(axes: Axes) -> None:
    """A logarithmic x axis with plain numbers at 1, 2 and 5."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _stacked(heights: Sequence[float], gap: float) -> list[float]:
    """Moves labels up, the lowest staying, until each is ``gap`` above the next lower one."""
    stacked = [0.0] * len(heights)
    floor = float("-inf")
    for index in sorted(range(len(heights)), key=lambda index: heights[index]):
        stacked[index] = max(heights[index], floor)
        floor = stacked[index] + gap
    return stacked


def _figure() -> tuple[Figure, Axes]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            "matplotlib, which draws the pictures, is not installed; install it with: pip install 'gradwire[bench]'"
        ) from error
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.add_subplot()
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=number > 0)
    return table


def _name(label: str, error: str | None) -> Text:
    name = Text(label)
    if error:
        name.append(f"\n{error}", style="red")
    return name


def _number(value: float | None, form: str, unit: float = 1.0) -> str:
    return _NOTHING if value is None else form.format(value / unit)


def _targets(row: SyncRow) -> Text:
    if not row.targets:
        return Text()
    wanted = f">= {row.targets['ratio_to_ddp']:g}"
    if least := row.targets.get("ratio_to_torch_powersgd"):
        wanted += f" and {_number(row.ratio_to_torch_powersgd, '{:.1f}')} of {least:g} x torch"
    return _verdict(wanted, reached=bool(row.reached))


def _verdict(wanted: str, *, reached: bool) -> Text:
    return Text.assemble(wanted, (" reached", "green") if reached else (" missed", "red"))


def _plain(value: Any) -> Any:
    """What JSON can say of a value: dataclasses become objects, with their properties."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        properties = (name for name, member in vars(type(value)).items() if isinstance(member, property))
        return fields | {name: _plain(getattr(value, name)) for name in properties}
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
