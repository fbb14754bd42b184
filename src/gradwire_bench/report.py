"""What a benchmark leaves: tables for the terminal, and a JSON that says where it was measured."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from gradwire.errors import ConfigurationError
from gradwire_bench.sync import SyncRow
from gradwire_bench.train import TrainRow

if TYPE_CHECKING:
    from gradwire.local.analysis import Analysis
    from gradwire_bench import gpu_report, periodic_results
    from gradwire_bench.kernels import Row as KernelRow

_MB = 1e6
_NOTHING = "-"


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


def command() -> str:
    """What was typed."""
    return shlex.join(["gradwire", *sys.argv[1:]])


def document(kind: str, **content: Any) -> dict[str, Any]:
    """The envelope of every JSON that gradwire writes.

    Args:
        kind: What the document holds, such as ``"bench.sync"``.
        **content: The document's own fields; dataclasses become objects, their properties included.
    """
    return {
        "schema": f"gradwire.{kind}/1",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command(),
        "machine": machine(),
        **{field: _plain(value) for field, value in content.items()},
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a document, making the folder where needed.

    Raises:
        ConfigurationError: If the path cannot be written.
    """
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a text, making the folder where needed.

    Raises:
        ConfigurationError: If the path cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}; choose another path") from error


def require(*libraries: str) -> None:
    """Makes sure that libraries are there that come with the extra ``bench``.

    Raises:
        ConfigurationError: If one is not installed.
    """
    if missing := [name for name in libraries if importlib.util.find_spec(name) is None]:
        raise ConfigurationError(
            f"{', '.join(missing)} is not installed; install it with: pip install 'gradwire[bench]'"
        )


def machine_line() -> str:
    """The machine in one line, for under a table."""
    facts = machine()
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, {facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']:g} GiB, "
        f"torch {facts['torch']}"
    )


def sync_table(rows: Sequence[SyncRow], title: str) -> Table:
    """Seconds a step, ratio to DDP fp32, bytes, and the wire thread's profile, of the rows of one link."""
    targets = [_targets(row) for row in rows]
    table = _table(
        title,
        "method",
        "s a step",
        "x DDP fp32",
        *(["target"] if any(targets) else []),
        "MB metered",
        "MB interface",
        "ms encode + wire + decode",
        "steps",
    )
    for row, target in zip(rows, targets, strict=True):
        table.add_row(
            _name(row.label, row.error),
            _number(row.median_seconds, "{:.3f}"),
            _number(row.ratio_to_ddp, "{:.2f}"),
            *([target] if any(targets) else []),
            _number(row.metered_bytes, "{:.2f}", _MB),
            _number(row.interface_bytes, "{:.2f}", _MB),
            Text("+".join(f"{1e3 * seconds:.0f}" for seconds in row.stages.values()) or _NOTHING),
            str(len(row.seconds) or row.steps_begun or _NOTHING),
        )
    return table


def train_table(rows: Sequence[TrainRow], title: str) -> Table:
    """Step time, bytes and accuracy of each contender."""
    target, first = (f"s to {rows[0].target_accuracy:.0%}", rows[0].label) if rows else ("s to target", "DDP fp32")
    table = _table(
        title, "method", "ms a step", f"x {first}", "MB metered", "MB interface", "x fewer bytes", "accuracy", target
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


def gpu_tables(measured: gpu_report.Report) -> Iterator[Table]:
    """What must hold, how fast each kernel is, and what each method adds to a step."""
    facts = ", ".join(f"{name} {value}" for name, value in measured.machine.items())
    table = _table(facts, "must hold", "", "found")
    for verdict in (*measured.bits, *measured.waits):
        table.add_row(Text(verdict.subject), _verdict("holds", reached=verdict.holds), Text(verdict.found))
    yield table
    table = _table(f"Kernels, copy {measured.copy:.0f} GB/s", "kernel", "M values", "us", "of copy", "target")
    for speed in measured.speeds:
        target = Text()
        if speed.target is not None:
            target = _verdict(f">= {speed.target:.0%}", reached=speed.of_copy >= speed.target)
        numbers = (f"{speed.numel / 1e6:g}", f"{speed.microseconds:.1f}", f"{speed.of_copy:.0%}")
        table.add_row(Text(speed.kernel), *numbers, target)
    yield table
    table = _table("A step at world size 1, bfloat16", "model", "method", "ms", "more than DDP", "target")
    for step in measured.steps:
        target = _verdict(f"<= {step.target:.0%}", reached=step.overhead <= step.target)
        table.add_row(step.model, Text(step.method), f"{step.milliseconds:.2f}", f"{step.overhead:+.1%}", target)
    yield table


def periodic_table(rows: Sequence[periodic_results.Row], title: str) -> Table:
    """Bytes, loss and accuracy of each plan beside full communication's, mean and range over the seeds."""
    shown = _table(
        title, "plan", "workers", "kB a step", "of full", "nats", "range", "above full", "accuracy", "s", "loss"
    )
    for row in rows:
        loss, accuracy, verdict = row.loss, row.accuracy, Text()
        if row.within is not None:
            verdict = Text("within", "green") if row.within else Text("above", "red")
        shown.add_row(
            _name(row.label, row.error),
            str(row.workers),
            _number(row.bytes, "{:.1f}", 1e3),
            _number(row.share, "{:.2%}"),
            _number(None if loss is None else loss.mean, "{:.3f}"),
            _NOTHING if loss is None else f"{loss.least:.3f} to {loss.most:.3f}",
            _number(row.gap, "{:+.3f}"),
            _number(None if accuracy is None else accuracy.mean, "{:.1%}"),
            _number(row.seconds, "{:.1f}"),
            verdict,
        )
    return shown


def speedup_table(rows: Sequence[periodic_results.Speedup], title: str) -> Table:
    """Loss by workers and steps of all workers together, and the speed-up."""
    totals = list(dict.fromkeys(row.workers * steps for row in rows for steps in row.losses))
    target = f"steps to {rows[0].target:.2f}" if rows else "steps"
    shown = _table(title, "workers", *(f"M K = {total:,}" for total in totals), target, "x fewer")
    for row in rows:
        by_total = {row.workers * steps: loss.mean for steps, loss in row.losses.items()}
        shown.add_row(
            str(row.workers),
            *(_number(by_total.get(total), "{:.3f}") for total in totals),
            _number(row.steps_to_target, "{:.0f}"),
            _number(row.times, "{:.1f}"),
        )
    return shown


def silence_table(rows: Sequence[periodic_results.Silence], limit: float) -> Table:
    """What an averager costs while it sends nothing."""
    shown = _table(
        "An optimizer step in which nothing is sent", "optimizer", "us bare", "us attached", "more", "target"
    )
    for row in rows:
        shown.add_row(
            row.optimizer,
            f"{1e6 * row.alone:.1f}",
            f"{1e6 * row.attached:.1f}",
            f"{row.overhead:+.1%}",
            _verdict(f"<= {limit:.0%}", reached=row.overhead <= limit),
        )
    return shown


def average_table(rows: Sequence[periodic_results.Average], title: str, limit: float) -> Table:
    """Time of an average against what the link alone needs for its bytes."""
    shown = _table(title, "method", "s", "MB metered", "s of the link", "x the link", "target")
    for row in rows:
        verdict = Text() if row.ratio is None else _verdict(f"<= {limit:g}", reached=row.ratio <= limit)
        shown.add_row(
            _name(row.method, row.error),
            _number(statistics.median(row.seconds) if row.seconds else None, "{:.3f}"),
            _number(row.metered_bytes, "{:.2f}", _MB),
            _number(row.link_seconds, "{:.3f}"),
            _number(row.ratio, "{:.2f}"),
            verdict,
        )
    return shown


def stream_table(rows: Sequence[periodic_results.Stream], title: str, least: float) -> Table:
    """Waiting with and without delay."""
    shown = _table(title, "averages", "s", "s waited", "of it at the end", "hidden", "target")
    for row in rows:
        verdict = Text() if row.hidden is None else _verdict(f">= {least:.0%}", reached=row.hidden >= least)
        seconds, waited, ending = (f"{each:.2f}" for each in (row.seconds, row.waited, row.ending))
        shown.add_row(row.plan, seconds, waited, ending, _number(row.hidden, "{:.0%}"), verdict)
    return shown


def analysis_table(label: str, analysis: Analysis) -> Table:
    """Omega and error of each layer, then the bounds side by side."""
    shown = _table(label, "layer", "elements", "Omega worker", "Omega owner", "(1 + M)(1 + W)", "error")
    for layer in analysis.layers:
        shown.add_row(
            layer.name,
            f"{layer.numel:,}",
            f"{layer.worker_omega:.3g}",
            f"{layer.owner_omega:.3g}",
            f"{layer.growth:.3g}",
            f"{layer.error:.3g}",
        )
    shown.add_section()
    elements = f"{sum(layer.numel for layer in analysis.layers):,}"
    layer_wise, entire = f"{analysis.layer_wise_bound:.3g}", f"{analysis.entire_model_bound:.3g}"
    shown.add_row("layer-wise", elements, "", "", layer_wise, f"{analysis.layer_wise_error:.3g}")
    shown.add_row("entire model", elements, "", "", entire, _number(analysis.entire_model_error, "{:.3g}"))
    return shown


def _table(title: str, *columns: str) -> Table:
    """Heads and names break where there is little room, else names would vanish in 80 columns."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
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
