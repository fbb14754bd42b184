"""What a benchmark shows: tables for the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from gradwire_bench.sync import SyncRow
from gradwire_bench.terminal import table
from gradwire_bench.train import TrainRow

if TYPE_CHECKING:
    from gradwire.local.analysis import Analysis
    from gradwire_bench import periodic_results
    from gradwire_bench.kernels import Row as KernelRow

_MB = 1e6
_NOTHING = "-"


def sync_table(rows: Sequence[SyncRow], title: str) -> Table:
    """Seconds a step, ratio to DDP fp32, bytes, and the wire thread's profile, of the rows of one link."""
    targets = [_targets(row) for row in rows]
    shown = table(
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
        shown.add_row(
            _name(row.label, row.error),
            _number(row.median_seconds, "{:.3f}"),
            _number(row.ratio_to_ddp, "{:.2f}"),
            *([target] if any(targets) else []),
            _number(row.metered_bytes, "{:.2f}", _MB),
            _number(row.interface_bytes, "{:.2f}", _MB),
            Text("+".join(f"{1e3 * seconds:.0f}" for seconds in row.stages.values()) or _NOTHING),
            str(len(row.seconds) or row.steps_begun or _NOTHING),
        )
    return shown


def train_table(rows: Sequence[TrainRow], title: str) -> Table:
    """Step time, bytes and accuracy of each contender."""
    target, first = (f"s to {rows[0].target_accuracy:.0%}", rows[0].label) if rows else ("s to target", "DDP fp32")
    shown = table(
        title, "method", "ms a step", f"x {first}", "MB metered", "MB interface", "x fewer bytes", "accuracy", target
    )
    for row in rows:
        shown.add_row(
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
    return shown


def kernels_table(rows: Sequence[KernelRow], title: str, threads: int) -> Table:
    """Time of each inner loop, as a multiple of a copy too, and how much faster it is on several threads, if any."""
    several = [f"{threads} threads, x"] if threads > 1 else []
    shown = table(title, "operation", "ms", "x copy", "target", "GB/s", "extra MB", *several)
    for row in rows:
        target = Text()
        if row.target is not None:
            target = _verdict(f"<= {row.target:g}", reached=row.times_copy <= row.target)
        shown.add_row(
            Text(row.operation),
            _number(row.milliseconds, "{:.1f}"),
            _number(row.times_copy, "{:.2f}"),
            target,
            _number(row.gigabytes_per_second, "{:.2f}"),
            _number(row.peak_extra_bytes, "{:.1f}", _MB),
            *([_number(row.times_faster, "{:.2f}")] if several else []),
        )
    return shown


def periodic_table(rows: Sequence[periodic_results.Row], title: str) -> Table:
    """Bytes, loss and accuracy of each plan beside full communication's, mean and range over the seeds."""
    shown = table(
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
    shown = table(title, "workers", *(f"M K = {total:,}" for total in totals), target, "x fewer")
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
    shown = table("An optimizer step in which nothing is sent", "optimizer", "us bare", "us attached", "more", "target")
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
    shown = table(title, "method", "s", "MB metered", "s of the link", "x the link", "target")
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
    shown = table(title, "averages", "s", "s waited", "of it at the end", "hidden", "target")
    for row in rows:
        verdict = Text() if row.hidden is None else _verdict(f">= {least:.0%}", reached=row.hidden >= least)
        seconds, waited, ending = (f"{each:.2f}" for each in (row.seconds, row.waited, row.ending))
        shown.add_row(row.plan, seconds, waited, ending, _number(row.hidden, "{:.0%}"), verdict)
    return shown


def analysis_table(label: str, analysis: Analysis) -> Table:
    """Omega and error of each layer, then the bounds side by side."""
    shown = table(label, "layer", "elements", "Omega worker", "Omega owner", "(1 + M)(1 + W)", "error")
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
