"""``gradwire bench sync``: how long averaging a model-shaped gradient takes, against DDP fp32 of the same run."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradwire import lab
from gradwire.errors import ConfigurationError, LabError, did_you_mean
from gradwire_bench import shapes as shape_sets
from gradwire_bench.contenders import DDP, FLOOR, TORCH_POWERSGD, Contender
from gradwire_bench.worker import ended_early

DEFAULT_METHODS = (
    DDP,
    FLOOR,
    "dense",
    "bf16",
    f"{TORCH_POWERSGD}:rank=4",
    "powersgd:rank=4",
    "acpsgd:rank=4",
    "efsignsgd",
    "topk:ratio=0.01",
    "qsgd:bits=4,owner=qsgd:4",
    "randomk:ratio=0.01",
)
BUDGET = 20.0
"""Seconds of timed steps for each contender on each link, once it has had its least number of steps."""

NO_LINK = "none"
"""The link that is no link: plain loopback."""

_GBIT, _100MBIT = 1_000_000_000, 100_000_000
TARGETS: dict[tuple[str, str], dict[int | None, float]] = {
    ("resnet50", "acpsgd:rank=4"): {_GBIT: 10, _100MBIT: 50, None: 2},
    ("resnet50", "powersgd:rank=4"): {_GBIT: 5, _100MBIT: 25, None: 1},
    ("resnet50", "efsignsgd"): {_GBIT: 7, _100MBIT: 20, None: 1.5},
    ("resnet50", "topk:ratio=0.01"): {_GBIT: 8, _100MBIT: 25, None: 1.5},
    ("resnet50", "qsgd:bits=4,owner=qsgd:4"): {_GBIT: 4, _100MBIT: 6.5, None: 1},
    ("resnet50", "randomk:ratio=0.01"): {_GBIT: 10, _100MBIT: 50, None: 2},
}
"""Speed-up over DDP fp32 that a method must reach with 4 workers, by shapes, method and link in bits per second."""

TARGET_WORKERS = 4
HOOK_TARGET = 3.0
"""Speed-up of ``powersgd:rank=4`` over PyTorch's own hook that it must reach at 1 Gbit/s."""


@dataclass
class SyncRow:
    """One contender on one link.

    Attributes:
        method: The contender as written on the command line.
        label: The contender's name for tables.
        link: The link's rate as written, or ``"none"``.
        seconds: Each timed step, the slowest rank's time in seconds.
        steps_begun: Steps done so far, warm-up included.
        metered_bytes: Bytes a worker and step handed over to be sent, by gradwire's meter; mean over workers.
        interface_bytes: Bytes a worker and step that its network interface sent, headers included.
        stages: Seconds a step of rank 0's wire thread by stage; ``"wire"`` includes waiting for the others.
        ratio_to_ddp: How many times faster than DDP fp32 of the same run.
        ratio_to_torch_powersgd: How many times faster than PyTorch's own hook in the same run.
        targets: What the row must reach: the value to reach by the name of the attribute that must reach it.
        reached: Whether every target was reached; ``None`` without target or measurement.
        error: Why there is no measurement.
    """

    method: str
    label: str
    link: str
    seconds: list[float] = field(default_factory=list)
    steps_begun: int = 0
    metered_bytes: float | None = None
    interface_bytes: float | None = None
    stages: dict[str, float] = field(default_factory=dict)
    ratio_to_ddp: float | None = None
    ratio_to_torch_powersgd: float | None = None
    targets: dict[str, float] = field(default_factory=dict)
    reached: bool | None = None
    error: str | None = None

    @property
    def median_seconds(self) -> float | None:
        """The median step."""
        return statistics.median(self.seconds) if self.seconds else None


def contenders(methods: Sequence[str]) -> list[Contender]:
    """The contenders of a run: the default rows, or those asked for with DDP fp32 before them to compare with."""
    chosen = [Contender.parse(text) for text in methods or DEFAULT_METHODS]
    baseline = Contender(DDP)
    return list(dict.fromkeys([baseline, *chosen]))


def link_rate(link: str) -> int | None:
    """A link's rate in bits per second, ``None`` for plain loopback.

    Raises:
        ConfigurationError: If the text is neither a rate nor ``"none"``.
    """
    try:
        return None if link == NO_LINK else lab.parse_rate(link)
    except ConfigurationError as error:
        hint = did_you_mean(link.lower(), [NO_LINK])
        raise ConfigurationError(f"link: {hint}{error}, or 'none' for plain loopback") from error


def measure_link(
    shapes: str,
    workers: int,
    link: str,
    racers: Sequence[Contender],
    steps: int,
    on_progress: Callable[[list[SyncRow]], object],
) -> list[SyncRow]:
    """Races all contenders over one link.

    Args:
        shapes: Name of the shape set.
        workers: Number of worker processes.
        link: The link's rate such as ``"1gbit"``, or ``"none"``.
        racers: The contenders, DDP fp32 among them.
        steps: Timed steps of each, fewer for those that would exceed the budget.
        on_progress: Called with the rows so far after every step.

    Returns:
        A row for every contender; one that failed says why.
    """
    rows = [SyncRow(str(racer), racer.label, link) for racer in racers]
    rate = link_rate(link)
    job = {
        "shapes": shapes,
        "methods": [str(racer) for racer in racers],
        "steps": steps,
        "budget": BUDGET,
        "timeout": _collective_timeout(shapes, rate),
        "shaped": rate is not None,
    }

    finished: set[int] = set()

    def on_line(rank: int, line: str) -> None:
        if not line.startswith("{"):
            return
        event = json.loads(line)
        if event["event"] == "result":
            finished.add(event["row"])
        _take(rows[event["row"]], event)
        on_progress(rows)

    try:
        with lab.Lab(workers=workers, rate=None if rate is None else link) as shaped:
            shaped.run([sys.executable, "-m", "gradwire_bench.sync_worker", json.dumps(job)], on_line=on_line)
    except LabError as error:
        if not any(row.steps_begun for row in rows):
            raise
        for number, row in enumerate(rows):
            if number not in finished and row.error is None:
                row.error = ended_early(error)
    _compare(rows, shapes, workers, rate)
    return rows


def _take(row: SyncRow, event: dict[str, Any]) -> None:
    match event["event"]:
        case "step":
            row.steps_begun += 1
            if event["timed"]:
                row.seconds.append(event["seconds"])
        case "failed":
            row.error = row.error or event["reason"]
            row.seconds = []
        case "result":
            row.seconds = event["seconds"]
            row.metered_bytes, row.interface_bytes = event["metered_bytes"], event["interface_bytes"]
            row.stages = event["stages"]


def _compare(rows: list[SyncRow], shapes: str, workers: int, rate: int | None) -> None:
    """Fills in the ratios and whether targets are reached."""
    medians = {row.method: row.median_seconds for row in rows if row.error is None}
    hook = next((median for method, median in medians.items() if method.startswith(TORCH_POWERSGD)), None)
    for row in rows:
        if workers == TARGET_WORKERS and rate in (targets := TARGETS.get((shapes, row.method), {})):
            row.targets = {"ratio_to_ddp": targets[rate]}
            if row.method == "powersgd:rank=4" and rate == _GBIT:
                row.targets["ratio_to_torch_powersgd"] = HOOK_TARGET
        median = medians.get(row.method)
        if median is None:
            row.reached = False if row.targets else None
            continue
        row.ratio_to_ddp = _ratio(medians.get(DDP), median)
        row.ratio_to_torch_powersgd = _ratio(hook, median)
        if row.targets:
            row.reached = all((getattr(row, name) or 0.0) >= least for name, least in row.targets.items())


def _ratio(reference: float | None, median: float) -> float | None:
    return None if reference is None else reference / median


def _collective_timeout(shapes: str, rate: int | None) -> float:
    """Seconds after which a collective counts as stuck: far longer than a dense average takes on the link."""
    dense_bits = 8 * 4 * shape_sets.numel(shape_sets.get(shapes)) * 2
    return 120.0 + (0.0 if rate is None else math.ceil(4 * dense_bits / rate))
