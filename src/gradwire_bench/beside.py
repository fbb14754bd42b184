"""Trainings by dense averages, beside which lines average the same gradients and change nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from rich.console import Console
from torch import nn

from gradwire_bench.contenders import DDP
from gradwire_bench.terminal import bars
from gradwire_bench.trial import Averages, Trial, run

Watching = TypeVar("Watching", bound=Averages)


def trained(
    console: Console,
    make: Callable[[nn.Module, Trial, int, Sequence[str]], Watching],
    lines: Sequence[str],
    workload: Any,
    optimizer: Any,
    rate: float,
    steps: int,
) -> Watching:
    """Trains with four workers, and returns what watched.

    Args:
        console: Where progress is drawn.
        make: Makes what averages densely and watches, given a model, a training, its steps and the lines.
        lines: What else averages.
        workload: The task.
        optimizer: What takes the averages.
        rate: The learning rate at its peak.
        steps: Number of steps.
    """
    made: list[Watching] = []

    def averages(net: nn.Module, trial: Trial, steps: int) -> Watching:
        made.append(make(net, trial, steps, lines))
        return made[0]

    with bars(console) as progress:
        bar = progress.add_task("dense averages, and the others beside", total=steps, news="")
        trial = Trial(workload, optimizer, 4, DDP, rate, 0)
        run(trial, steps, partial(_show, progress, bar), samples=1, averages=averages)
    return made[0]


def _show(progress: Any, bar: Any, done: int) -> None:
    progress.update(bar, completed=done)
