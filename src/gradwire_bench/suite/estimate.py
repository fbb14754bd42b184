"""How long a plan takes here: steps of each net are timed, and links have the speed that they say."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import islice

import torch
import torch.nn.functional as F

from gradwire.cost.measure import one_thread
from gradwire.errors import ConfigurationError
from gradwire_bench import shapes
from gradwire_bench.cell import Cell, cut
from gradwire_bench.contenders import Contender
from gradwire_bench.data import Dataset
from gradwire_bench.launch import link_rate
from gradwire_bench.suite.run import IN_PROCESS, heats
from gradwire_bench.sync import BUDGET
from gradwire_bench.sync_worker import LEAST_STEPS, WARM_UP_STEPS
from gradwire_bench.tasks import Share
from gradwire_bench.workloads import WORKLOADS

START_SECONDS = 12.0
"""Until worker processes have imported, found each other and compiled nothing more."""
CELL_SECONDS = 1.5
"""Of a training in one process beyond its steps: data, tests."""
COMPRESSING = 1.5
"""Times a step's forward and backward that it takes with what is done to its gradients."""

_SHARES = {"ddp": 1.0, "dense": 1.0, "bf16": 0.5, "fp16": 0.5, "torch-fp16": 0.5, "floor": 0.0}
_SHARE = 0.12
"""Bytes as a share of dense ones: of those known, and a guess of all others."""


def seconds(cells: Sequence[Cell], jobs: int, dataset: Dataset) -> float:
    """Of all cells, when so many run side by side where they can."""
    alone = sum(_in_process(cell, dataset) for cell in cells if cell.kind in IN_PROCESS)
    rest = [cell for cell in cells if cell.kind not in IN_PROCESS]
    return alone / jobs + sum(START_SECONDS + _over_a_link(heat, dataset) for heat in heats(rest))


def duration(total: float) -> str:
    """In words, as coarse as an estimate is."""
    if total < 90:
        return f"{max(round(total, -1), 10):.0f} s"
    return f"{total / 60:.0f} min" if total < 5400 else f"{total / 3600:.1f} h"


def _in_process(cell: Cell, dataset: Dataset) -> float:
    workload = WORKLOADS[cell.workload]
    if cell.kind == "codec":
        return 0.5
    samples = cell.steps * cell.workers * (cell.batch or workload.batch)
    return CELL_SECONDS + COMPRESSING * samples * _sample_seconds(cell.workload, True, dataset)


def _over_a_link(heat: Iterable[Cell], dataset: Dataset) -> float:
    total = 0.0
    for cell in heat:
        if cell.kind == "kernel":
            total += 4e-9 * cut(cell.workload)[1] * (cell.steps + 2)
            continue
        rate = link_rate(cell.link)
        share = _SHARES.get(Contender.parse(cell.method).name, _SHARE)
        if cell.kind == "sync":
            numel = shapes.numel(shapes.get(cell.workload))
            step = 4e-9 * numel * cell.workers + _wire_seconds(numel, cell.workers, share, rate)
            total += step * (WARM_UP_STEPS + max(min(cell.steps, BUDGET / step), LEAST_STEPS))
        else:
            workload = WORKLOADS[cell.workload]
            samples = cell.workers * (cell.batch or workload.batch) / min(cell.workers, os.cpu_count() or 1)
            small = cell.kind == "local"
            numel = _numel(cell.workload, small)
            computing = COMPRESSING * samples * _sample_seconds(cell.workload, small, dataset)
            share /= max(cell.every, 1)
            total += cell.steps * (computing + _wire_seconds(numel, cell.workers, share, rate)) + 3 * CELL_SECONDS
    return total


def _wire_seconds(numel: int, workers: int, share: float, rate: int | None) -> float:
    return 0.0 if rate is None else share * 64 * numel * (workers - 1) / workers / rate


@cache
def _numel(name: str, small: bool) -> int:
    net = WORKLOADS[name].small() if small else WORKLOADS[name].net()
    return sum(each.numel() for each in net.parameters())


@cache
def _sample_seconds(name: str, small: bool, dataset: Dataset) -> float:
    """One thread's forward and backward of one sample, the quicker of two; nothing where the data is missing."""
    workload = WORKLOADS[name]
    try:
        source = workload.locate(dataset)
        task = workload.task(source, Share(workload.batch, seed=0))
    except ConfigurationError:
        return 0.0
    with one_thread():
        net = workload.model(source, small=small)
        found = []
        for inputs, wanted in islice(task.batches(), 3):
            start = time.perf_counter()
            torch.autograd.backward(F.cross_entropy(net(inputs), wanted))
            found.append((time.perf_counter() - start) / workload.batch)
        return min(found)
