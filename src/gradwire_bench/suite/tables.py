"""Records side by side: cells that differ in their seed alone are one row, with mean and range."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from gradwire_bench.cell import Cell, Record
from gradwire_bench.contenders import Contender, Option
from gradwire_bench.suite.measures import MEASURES
from gradwire_bench.suite.table import Line, Table, Value
from gradwire_bench.suite.targets import LEAST_POINTS, SHARE
from gradwire_bench.workloads import WORKLOADS

STAGES = ("encode", "wire", "decode")
PHASES = ("forward", "backward", "update", *STAGES, "idle")


def label(cell: Cell) -> str:
    """A contender's name by itself; what is timed by itself has its own."""
    return Contender.parse(cell.contender).label if cell.races else cell.method


def labels(records: Sequence[Record]) -> dict[Cell, str]:
    """Contenders' names beside one another, without the options that all methods of ours have in common."""
    parsed = {each.cell: _parsed(each.cell.contender) for each in records}
    common = shared(records)
    return {
        cell: replace(each, options=tuple(option for option in each.options if option not in common)).label
        for cell, each in parsed.items()
    }


def shared(records: Sequence[Record]) -> set[tuple[str, Option]]:
    """Options that all of several methods of ours have."""
    contenders = {_parsed(each.cell.contender) for each in records if each.cell.races}
    ours = [each for each in contenders if each.is_ours]
    if len({each.name for each in ours}) < 2:
        return set()
    first, *others = (set(each.options) for each in ours)
    return first.intersection(*others)


@cache
def _parsed(text: str) -> Contender:
    return Contender.parse(text)


def by_seed(records: Sequence[Record]) -> list[list[Record]]:
    """Records that differ in their seed alone together, those that failed left out."""
    groups: dict[object, list[Record]] = {}
    for each in records:
        if not each.error:
            groups.setdefault(each.cell.setting("seed"), []).append(each)
    return list(groups.values())


def mean(records: Sequence[Record], measure: str) -> float | None:
    """The mean of a figure over records that have it."""
    values = [value for each in records if (value := MEASURES[measure].of(each)) is not None]
    return statistics.fmean(values) if values else None


def tables(records: Sequence[Record]) -> list[Table]:
    """All tables of a report; those without a row are left out."""
    made = (_training, _quality, _local, _averages, _codecs, _loops)
    found = [make([each for each in records if each.cell.kind == kind]) for make, kind in zip(made, KINDS, strict=True)]
    return [_told(table) for table in found if table.lines]


def _told(table: Table) -> Table:
    """With what its methods have in common, which their names leave out."""
    common = sorted(
        f"{option}={value}" for option, value in shared([each for line in table.lines for each in line.records])
    )
    return replace(table, about=f"{table.about} All methods have {', '.join(common)}.") if common else table


KINDS = ("train", "trial", "local", "sync", "codec", "kernel")


def dense(groups: Sequence[list[Record]], cell: Cell) -> list[Record]:
    """The records of dense averages in a cell's setting; none if they were not measured."""
    apart = ("method", "granularity", "route", "seed", "rate", "optimizer")
    for group in groups:
        here = group[0].cell
        if here.is_baseline and here.setting(*apart) == cell.setting(*apart) and here.optimizer == cell.optimizer:
            return group
    return []


_FURTHER = ("workers", "framework", "backend", "device")


def _varied(groups: Sequence[list[Record]]) -> list[str]:
    """Axes that have a column only where they have more than one value."""
    return [axis for axis in _FURTHER if len({getattr(group[0].cell, axis) for group in groups}) > 1]


def _table(
    title: str, about: str, groups: Sequence[list[Record]], values: Callable[[list[Record]], dict[str, Value]]
) -> Table:
    return Table(title, about, [Line(values(group), group) for group in groups])


def _axes(cell: Cell, axes: Sequence[str]) -> dict[str, Value]:
    return {axis: Value(str(value := getattr(cell, axis)), value) for axis in axes}


def _training(records: Sequence[Record]) -> Table:
    groups, names = by_seed(records), labels(records)
    axes = _varied(groups)

    def values(group: list[Record]) -> dict[str, Value]:
        cell = group[0].cell
        return {
            "workload": _text(WORKLOADS[cell.workload].what),
            "link": _text(cell.link),
            "method": _text(names[cell]),
            **_axes(cell, axes),
            "quality %": _learnt(group),
            "ms a step": _spread(group, "seconds"),
            "x DDP": _times(groups, group),
            "samples/s": _figure(group, "throughput"),
            "kB a step": _figure(group, "bytes"),
            "x fewer bytes": _figure(group, "fewer_bytes"),
            "target %": _figure(group, "target"),
            "s to target": _reached(group),
            "peak MB": _figure(group, "peak_bytes"),
            **{f"{name} ms": _number(_mean([phase(each, name) for each in group]), "{:.1f}", 1e3) for name in PHASES},
        }

    return _table(
        "Training over a link",
        "Real processes, the same start, batches and steps for every contender; after ± is half the range over "
        "seeds. Quality is the share of right answers on held-out data, for segmentation intersection over union, "
        f"for recommendation hits in ten. The target is {SHARE:.0%} of what dense averages have at the end of a "
        f"curve of at least {LEAST_POINTS} points, where they had less at its first one; seconds to it are to the "
        "first point of a training's own curve that is as good, of all its seeds. Samples are of all workers "
        "together. Forward, backward (until gradients are averaged) and update are of the training thread; encode, "
        "wire and decode are of the wire thread, which works beside it and is idle for the rest of the step. "
        "Peak is resident memory, Python and torch included.",
        groups,
        values,
    )


def phase(record: Record, name: str) -> float | None:
    """Seconds a step of one of :data:`PHASES`; of those of the wire thread None where nobody counts."""
    phases: dict[str, float] = record.result["phases"]
    if name != "idle":
        return phases.get(name)
    step = MEASURES["seconds"].of(record)
    busy = [phases[stage] for stage in STAGES if stage in phases]
    return max(step - sum(busy), 0.0) if step is not None and busy else None


def _reached(group: Sequence[Record]) -> Value:
    """Seconds to the target where all seeds came there; else how many did not."""
    missed = sum(MEASURES["target_seconds"].of(each) is None for each in group)
    if not missed:
        return _spread(group, "target_seconds")
    if mean(group, "target") is None:
        return Value("", None)
    return Value("not reached" if missed == len(group) else f"{missed} of {len(group)} not", None)


def _quality(records: Sequence[Record]) -> Table:
    groups, names = by_seed(records), labels(records)
    axes = _varied(groups)

    def values(group: list[Record]) -> dict[str, Value]:
        cell = group[0].cell
        baseline, own = mean(dense(groups, cell), "quality"), mean(group, "quality")
        lost = None if baseline is None or own is None else own - baseline
        return {
            "workload": _text(WORKLOADS[cell.workload].what),
            "optimizer": _text(cell.optimizer),
            "method": _text(names[cell]),
            **_axes(cell, axes),
            "quality %": _learnt(group),
            "points": _number(lost, "{:+.2f}", 100),
            "loss in bits": _figure(group, "loss"),
            "kB a step": _figure(group, "bytes"),
            "x fewer bytes": _figure(group, "fewer_bytes"),
            "seeds": _number(len(group), "{:.0f}"),
        }

    return _table(
        "What is learnt",
        "Small models, all workers in one process on the wire's own code: mean over seeds, and half the range. Points "
        "are against dense averages under the same optimizer.",
        groups,
        values,
    )


def _local(records: Sequence[Record]) -> Table:
    names = labels(records)

    def values(group: list[Record]) -> dict[str, Value]:
        cell = group[0].cell
        return {
            "workload": _text(WORKLOADS[cell.workload].what),
            "workers": _number(cell.workers, "{:.0f}"),
            "average": _text(f"every {cell.every} steps" if cell.every else "every step"),
            "method": _text(names[cell]),
            "quality %": _learnt(group),
            "loss in bits": _spread(group, "loss"),
            "kB a step": _figure(group, "bytes"),
            "x fewer bytes": _figure(group, "fewer_bytes"),
        }

    return _table(
        "Local steps",
        "Real processes; what local steps changed is averaged now and then, the last of them at the end.",
        by_seed(records),
        values,
    )


def _averages(records: Sequence[Record]) -> Table:
    groups, names = by_seed(records), labels(records)
    axes = _varied(groups)

    def values(group: list[Record]) -> dict[str, Value]:
        cell = group[0].cell
        stages = {stage: _mean([each.result["stages"].get(stage) for each in group]) for stage in STAGES}
        return {
            "shapes": _text(cell.workload),
            "link": _text(cell.link),
            "method": _text(names[cell]),
            **_axes(cell, axes),
            "ms a step": _spread(group, "seconds"),
            "x DDP": _times(groups, group),
            "kB a step": _figure(group, "bytes"),
            **{f"{stage} ms": _number(seconds, "{:.1f}", 1e3) for stage, seconds in stages.items()},
        }

    return _table(
        "Averages alone",
        "A gradient of a known model's shapes through DDP, nothing else computed; the slowest worker's median step.",
        groups,
        values,
    )


def _codecs(records: Sequence[Record]) -> Table:
    def values(group: list[Record]) -> dict[str, Value]:
        cell = group[0].cell
        return {
            "workload": _text(WORKLOADS[cell.workload].what),
            "steps": _number(cell.steps, "{:.0f}"),
            "method": _text(cell.method),
            "granularity": _text(cell.granularity or "layer"),
            "bits a value": _figure(group, "bits"),
            "error": _figure(group, "error"),
        }

    return _table(
        "Size and error of one gradient",
        "Gradients recorded after so many steps of dense training, compressed without a memory; the error is the "
        "squared distance as a share of the gradient's square.",
        by_seed(records),
        values,
    )


def _loops(records: Sequence[Record]) -> Table:
    def values(group: list[Record]) -> dict[str, Value]:
        def figure(name: str, form: str, scale: float = 1.0) -> Value:
            return _number(_mean([each.result[name] for each in group]), form, scale)

        return {
            "operation": _text(group[0].cell.method),
            "values": _text(group[0].cell.workload),
            "ms": _figure(group, "seconds"),
            "x a copy": figure("times_copy", "{:.2f}"),
            "GB/s": figure("gigabytes_per_second", "{:.2f}"),
            "MB beyond": figure("peak_extra_bytes", "{:.1f}", 1e-6),
        }

    return _table(
        "Inner loops",
        "On one thread, the median of some rounds; a copy is that of the same tensor in the same round. Gigabytes are "
        "of the gradient.",
        by_seed(records),
        values,
    )


def _times(groups: Sequence[list[Record]], group: list[Record]) -> Value:
    """How many times as fast as dense averages in the same setting."""
    baseline, own = mean(dense(groups, group[0].cell), "seconds"), mean(group, "seconds")
    return _number(baseline / own if baseline and own else None, "{:.2f}")


def _text(text: str) -> Value:
    return Value(text, text)


def _number(value: float | None, form: str, scale: float = 1.0) -> Value:
    return Value("" if value is None else form.format(scale * value), value)


def _figure(group: Sequence[Record], name: str) -> Value:
    value = mean(group, name)
    return Value(MEASURES[name].text(value), value)


def _spread(group: Sequence[Record], name: str) -> Value:
    """Mean and half the range over seeds."""
    measure = MEASURES[name]
    values = [value for each in group if (value := measure.of(each)) is not None]
    text = measure.text(mean(group, name))
    if len(values) > 1:
        text += f" ± {measure.text((max(values) - min(values)) / 2)}"
    return Value(text, mean(group, name))


def _learnt(group: Sequence[Record]) -> Value:
    """Quality, and how many trainings diverged: their last loss is no number."""
    value = _spread(group, "quality")
    if lost := sum("loss" in each.result and MEASURES["loss"].of(each) is None for each in group):
        told = f"{lost} of {len(group)} diverged" if len(group) > 1 else "diverged"
        return replace(value, text=f"{value.text} {told}".strip())
    return value


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
