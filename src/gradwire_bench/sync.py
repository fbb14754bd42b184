"""``gradwire bench sync``: how long averaging a model-shaped gradient takes, against DDP fp32 of the same run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gradwire_bench import launch
from gradwire_bench import shapes as shape_sets
from gradwire_bench.cell import Cell
from gradwire_bench.contenders import DDP, FLOOR, TORCH_POWERSGD, Contender

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


def race(cells: Sequence[Cell], on_progress: Callable[[list[SyncRow]], object]) -> list[SyncRow]:
    """Races contenders over one link.

    Args:
        cells: One for each, DDP fp32 among them; a slow contender has fewer steps, as the budget allows.
        on_progress: Called with the rows so far after every step.

    Returns:
        A row for every cell; one that failed says why.
    """
    first = cells[0]
    rows = [SyncRow(cell.contender, Contender.parse(cell.contender).label, cell.link) for cell in cells]
    rate = launch.link_rate(first.link)
    job = {
        "shapes": first.workload,
        "methods": [cell.contender for cell in cells],
        "steps": first.steps,
        "budget": BUDGET,
        "timeout": _collective_timeout(first.workload, rate),
    }

    def on_step(row: SyncRow, event: launch.Event) -> None:
        row.steps_begun += 1
        if event["timed"]:
            row.seconds.append(event["seconds"])

    launch.race("gradwire_bench.sync_worker", job, first.workers, first.link, rows, on_step, lambda: on_progress(rows))
    for row in rows:
        if row.error:
            row.seconds = []
    _compare(rows, first.workload, first.workers, rate)
    return rows


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
