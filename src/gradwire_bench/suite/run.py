"""Runs the cells of a plan: trainings in one process side by side, those over a link one setting after another."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any

from gradwire_bench import frontier, kernels, optimizers, origin, periodic, sync, train, trial
from gradwire_bench import shapes as shape_sets
from gradwire_bench.abreast import abreast
from gradwire_bench.cell import Cell, Record, cut
from gradwire_bench.contenders import Contender
from gradwire_bench.data import Dataset
from gradwire_bench.gradients import Recording, real_gradients
from gradwire_bench.periodic_plans import Plan, Run
from gradwire_bench.periodic_results import Outcome
from gradwire_bench.suite.ledger import Ledger
from gradwire_bench.train_worker import JUDGED_STEPS
from gradwire_bench.worker import reason
from gradwire_bench.workloads import WORKLOADS, bits

IN_PROCESS = ("trial", "codec")
"""Kinds of cells that need no processes of their own, and run side by side."""

Result = tuple[dict[str, Any], str | None]
"""A cell's figures, and why there are none."""

News = Callable[[str, int], object]
"""Told what is going on, and how many cells have ended since it was told last."""


@dataclasses.dataclass(frozen=True)
class Runner:
    """What all cells share.

    Attributes:
        ledger: Where records go as they come.
        command: What the cells' own commands begin with.
        dataset: The images.
        jobs: Cells that run side by side where they need no processes of their own.
    """

    ledger: Ledger
    command: str
    dataset: Dataset
    jobs: int

    def run(self, cells: Sequence[Cell], news: News) -> None:
        """Measures what is missing; a cell that fails has a record that says why, and the others go on."""
        missing = self.ledger.missing(cells)
        self._beside_one_another([cell for cell in missing if cell.kind in IN_PROCESS], news)
        for heat in heats([cell for cell in missing if cell.kind not in IN_PROCESS]):
            started = time.monotonic()
            news(f"{heat[0].kind} {heat[0].workload}, {heat[0].workers} workers, link {heat[0].link}", 0)
            try:
                results = _HEATS[heat[0].kind](heat, self.dataset, news)
            except Exception as caught:  # whatever stops a heat belongs in its cells
                results = [({}, reason(caught))] * len(heat)
            for record in records(heat, results, started, self.command):
                self.ledger.add(record)
            news("", len(heat))

    def _beside_one_another(self, cells: Sequence[Cell], news: News) -> None:
        """So many at once as there are jobs."""
        if not cells:
            return
        with abreast(partial(measure, dataset=self.dataset), min(self.jobs, len(cells))) as run:
            for cell, future in run(cells):
                try:
                    result, seconds, error = future.result()
                except Exception as caught:  # a process that died
                    result, seconds, error = {}, 0.0, reason(caught)
                self.ledger.add(Record.now(cell, result, seconds, cell.command(self.command), error))
                news(f"{cell.workload} {cell.contender}, seed {cell.seed}", 1)


def heats(cells: Sequence[Cell]) -> Iterator[list[Cell]]:
    """Cells that race one another in the same processes: they differ alone in what is averaged how, and when."""
    groups: dict[object, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.setting("method", "granularity", "route", "every"), []).append(cell)
    yield from groups.values()


def measure(cell: Cell, dataset: Dataset) -> tuple[dict[str, Any], float, str | None]:
    """A cell that needs no processes: its figures, its seconds, and why there are none."""
    started = time.monotonic()
    try:
        result, error = (_trained if cell.kind == "trial" else _coded)(cell, dataset), None
    except Exception as caught:  # whatever stops a cell belongs in its record
        result, error = {}, reason(caught)
    return result, time.monotonic() - started, error


def _trained(cell: Cell, dataset: Dataset) -> dict[str, Any]:
    workload = WORKLOADS[cell.workload]
    rate = cell.rate * optimizers.base_rate(workload, cell.optimizer)
    wanted = trial.Trial(workload.name, cell.optimizer, cell.workers, cell.contender, rate, cell.seed)
    done = trial.run(wanted, cell.steps, lambda step: None, dataset=dataset, batch=cell.batch, device=cell.device)
    result = dataclasses.asdict(done)
    return {name: None if value in (math.inf, "") else value for name, value in result.items()}


def _coded(cell: Cell, dataset: Dataset) -> dict[str, Any]:
    """A codec's size and error on gradients recorded after so many steps."""
    recording = _recording(cell.workload, dataset, cell.steps, cell.seed)
    bits, error = frontier.measured(recording, Contender.parse(cell.method), cell.granularity or "layer")
    return {"bits": bits, "error": error}


@cache
def _recording(name: str, dataset: Dataset, steps: int, seed: int) -> Recording:
    workload = WORKLOADS[name]
    gradients = real_gradients(workload.locate(dataset), 1 + frontier.WARM_UP_STEPS, steps, seed, workload)
    return Recording.of(workload.what, gradients)


def _race(heat: Sequence[Cell], dataset: Dataset, news: News) -> list[Result]:
    first = heat[0]
    workload = WORKLOADS[first.workload]
    train.check_framework(first.framework, workload)

    def show(rows: list[train.TrainRow]) -> None:
        going = [row for row in rows if row.accuracy is None and row.error is None]
        if going:
            news(f"{workload.what}, link {first.link}: {going[0].label}, step {going[0].steps_done}", 0)

    rows = train.race(heat, workload.locate(dataset), show)
    if first.steps < JUDGED_STEPS:
        for row in rows:
            row.accuracy = None
    return [figures(row) for row in rows]


def _local(heat: Sequence[Cell], dataset: Dataset, news: News) -> list[Result]:
    first = heat[0]
    workload = WORKLOADS[first.workload]
    peak = first.rate * optimizers.base_rate(workload, first.optimizer)
    plans = [Plan(cell.contender, cell.every, cell.contender) for cell in heat]

    def show(outcomes: list[Outcome]) -> None:
        news(f"{workload.what}, local steps: {sum(each.steps_done for each in outcomes)} steps", 0)

    outcomes = periodic.train(
        workload,
        workload.locate(dataset),
        first.workers,
        first.link,
        [Run(plan, first.seed, first.steps, peak) for plan in plans],
        optimizer=first.optimizer,
        batch=first.batch or None,
        on_progress=show,
    )
    names = ("accuracy", "dense_bytes", "metered_bytes", "interface_bytes", "parameters")
    return [
        ({}, each.error)
        if each.error or each.loss is None
        else ({**{name: getattr(each, name) for name in names}, "loss": bits(each.loss)}, None)
        for each in outcomes
    ]


def _average(heat: Sequence[Cell], dataset: Dataset, news: News) -> list[Result]:
    first = heat[0]

    def show(rows: list[sync.SyncRow]) -> None:
        news(f"averages of {first.workload}, link {first.link}: {sum(row.steps_begun for row in rows)} steps", 0)

    return averages(sync.race(heat, show), first)


def _loops(heat: Sequence[Cell], dataset: Dataset, news: News) -> list[Result]:
    segments, numel = cut(heat[0].workload)

    def show(done: int, total: int, name: str) -> None:
        news(f"{name}, {done} of {total}", 0)

    rows = kernels.measure(numel, heat[0].steps, segments, show)
    found = {row.operation: dataclasses.asdict(row) for row in rows}
    return [
        (found[cell.method], None) if cell.method in found else ({}, f"operations are {', '.join(found)}")
        for cell in heat
    ]


_HEATS: dict[str, Callable[[Sequence[Cell], Dataset, News], list[Result]]] = {
    "train": _race,
    "local": _local,
    "sync": _average,
    "kernel": _loops,
}


def records(cells: Sequence[Cell], results: Iterable[Result], started: float, command: str = "") -> list[Record]:
    """What came of cells that were measured together, each with its share of the time since they started.

    Args:
        cells: What was measured.
        results: What came of each.
        started: On the monotonic clock.
        command: Of which each cell is measured alone by a part; what was typed if there is none.
    """
    each = (time.monotonic() - started) / len(cells)
    return [
        Record.now(cell, found, each, cell.command(command) if command else origin.command(), error)
        for cell, (found, error) in zip(cells, results, strict=True)
    ]


def averages(rows: Sequence[sync.SyncRow], cell: Cell) -> list[Result]:
    """Figures of rows in a cell's setting, with the bytes of a dense average."""
    numel = shape_sets.numel(shape_sets.get(cell.workload))
    dense = 8 * (cell.workers - 1) / cell.workers * numel
    return [({**found, "dense_bytes": dense} if found else {}, error) for found, error in map(figures, rows)]


def figures(row: train.TrainRow | sync.SyncRow) -> Result:
    """A row's measurements without what the cell says anyway, and its error."""
    if row.error:
        return {}, row.error
    left_out = {"method", "label", "link", "framework", "error", "targets", "reached", "steps_begun", "steps_done"}
    left_out |= {"speedup", "ratio_to_ddp", "ratio_to_torch_powersgd"}
    return {name: _finite(value) for name, value in dataclasses.asdict(row).items() if name not in left_out}, None


def _finite(value: Any) -> Any:
    """None for what JSON has no number for: losses of a training that diverged."""
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
