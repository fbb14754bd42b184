"""The figures of records that can be compared, whatever kind of cell they are of."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection
from dataclasses import dataclass

from gradwire.errors import ConfigurationError
from gradwire_bench.cell import Record
from gradwire_bench.contenders import DDP
from gradwire_bench.workloads import WORKLOADS


@dataclass(frozen=True)
class Measure:
    """A figure.

    Attributes:
        title: For a table's head.
        unit: Of what is shown.
        scale: What a value is multiplied by to be shown.
        more_is_better: Which way is up.
        take: Finds it among the figures of a record.
        form: How it is written.
    """

    title: str
    unit: str
    scale: float
    more_is_better: bool
    take: Callable[[Record], float | None]
    form: str = "{:.3g}"

    def of(self, record: Record) -> float | None:
        """The value of a record; None if it has none, or one that is no number."""
        value = None if record.error else self.take(record)
        return value if value is None or math.isfinite(value) else None

    def text(self, value: float | None) -> str:
        """As shown: large numbers in full, not as powers of ten."""
        text = "" if value is None else self.form.format(self.scale * value)
        return f"{float(text):.0f}" if "e+" in text else text


def times(record: Record) -> list[float]:
    """Seconds of each timed step."""
    return record.result.get("step_seconds") or record.result.get("seconds") or []


def _seconds(record: Record) -> float | None:
    steps = times(record)
    return statistics.median(steps) if steps else None


def _throughput(record: Record) -> float | None:
    """Of trainings over a link, of all workers together."""
    cell, seconds = record.cell, _seconds(record)
    if cell.kind != "train" or not seconds:
        return None
    return cell.workers * (cell.batch or WORKLOADS[cell.workload].batch) / seconds


def _sent(record: Record) -> float | None:
    """By the meter; for plain DDP by its formula; for PyTorch's hooks by the interface, headers included."""
    own = "dense_bytes" if record.cell.method == DDP else "interface_bytes"
    for name in ("metered_bytes", "sent_bytes", own):
        if record.result.get(name) is not None:
            return float(record.result[name])
    return None


def _fewer(record: Record) -> float | None:
    sent = _sent(record)
    return record.result["dense_bytes"] / sent if sent and record.result.get("dense_bytes") else None


def _figure(name: str) -> Callable[[Record], float | None]:
    return lambda record: record.result.get(name)


MEASURES = {
    "quality": Measure("quality", "points", 100, True, _figure("accuracy"), "{:.2f}"),
    "loss": Measure("loss", "bits", 1, False, _figure("loss"), "{:.3f}"),
    "seconds": Measure("ms a step", "ms", 1e3, False, _seconds, "{:.4g}"),
    "throughput": Measure("samples/s", "samples/s", 1, True, _throughput, "{:.1f}"),
    "bytes": Measure("kB a step", "kB", 1e-3, False, _sent, "{:.4g}"),
    "fewer_bytes": Measure("x fewer bytes", "x", 1, True, _fewer, "{:.3g}"),
    "target": Measure("target", "points", 100, True, _figure("target_accuracy"), "{:.1f}"),
    "target_seconds": Measure("s to target", "s", 1, False, _figure("seconds_to_target"), "{:.1f}"),
    "peak_bytes": Measure("peak MB", "MB", 1e-6, False, _figure("peak_bytes"), "{:.0f}"),
    "bits": Measure("bits a value", "bits", 1, False, _figure("bits"), "{:.4g}"),
    "error": Measure("error", "", 1, False, _figure("error"), "{:.3g}"),
}


def gains(records: Collection[Record]) -> dict[str, float]:
    """Points of quality of each contender above dense averages in the same setting.

    Raises:
        ConfigurationError: If there is no training with dense averages.
    """
    apart = ("method", "granularity", "route")
    dense = {
        each.cell.setting(*apart): value
        for each in records
        if each.cell.is_baseline and (value := MEASURES["quality"].of(each)) is not None
    }
    if not dense:
        raise ConfigurationError(f"no training has {DDP} to compare with; make one with gradwire bench train")
    return {
        each.cell.contender: MEASURES["quality"].scale * (value - dense[key])
        for each in records
        if (value := MEASURES["quality"].of(each)) is not None and (key := each.cell.setting(*apart)) in dense
    }
