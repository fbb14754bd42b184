"""Bits that go with the training, against as many bytes spent evenly.

``python -m gradwire_bench.adaptive image momentum deadzone:bits=0.1 0.16`` prints a table for a workload, an optimizer,
a method and a peak learning rate. All policies have the same bytes in all: what they say is how a window's bits compare
to what is left for each step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from statistics import mean, stdev
from typing import Any

import torch
from rich.console import Console
from torch import nn

from gradwire_bench.contenders import Contender
from gradwire_bench.terminal import bars, table
from gradwire_bench.trial import STEPS, Averages, Result, Trial, run

WINDOW = 25
"""Steps between two choices."""

LARGEST = 2.0
"""A window's bits are at most so many times what is left for each step, and at least that part of it."""

SEEDS = (0, 1, 2)

Policy = Callable[[float, float], float]
"""From the share of the steps that are done, and from what the cosine to the dense average lacks to 1, in the window
before, over its mean so far, to bits over what is left for each step."""

POLICIES: Mapping[str, Policy] = {
    "the same throughout": lambda done, lack: 1.0,
    "more where the cosine falls": lambda done, lack: lack,
    "fewer where the cosine falls": lambda done, lack: 1 / lack,
    "more early: falling from 2 to 0.4 times": lambda done, lack: 2 - done,
    "more late: rising from 0.5 to 2 times": lambda done, lack: 1 / (2 - done),
}


class Budget:
    """Bits a value of the steps to come.

    Args:
        bits: Of a step, in the mean of all.
        steps: Number of steps.
        policy: What a window gets.
    """

    def __init__(self, bits: float, steps: int, policy: Policy) -> None:
        self._left, self._steps, self._policy = bits * steps, steps, policy
        self._done = 0
        self._lacks: list[float] = []

    def window(self) -> float:
        """Takes the next window's bits from what is left."""
        past = self._lacks or [1.0]
        relative = self._policy(self._done / self._steps, past[-1] / mean(past))
        steps = min(WINDOW, self._steps - self._done)
        evenly, later = self._left / (self._steps - self._done), self._steps - self._done - steps
        most = (self._left - later * evenly / LARGEST) / steps
        bits = round(min(evenly * min(max(relative, 1 / LARGEST), LARGEST), most), 6)
        self._left -= bits * steps
        self._done += steps
        return bits

    def saw(self, cosine: float) -> None:
        """Takes in a window's mean cosine."""
        self._lacks.append(max(1 - cosine, 1e-9))


class Spending(Averages):
    """Averages whose bits a policy chooses.

    Args:
        net: The model.
        trial: What to train; its method has ``bits``.
        steps: Number of steps.
        policy: What chooses.
    """

    def __init__(self, net: nn.Module, trial: Trial, steps: int, policy: Policy) -> None:
        super().__init__(net, trial, steps)
        self._contender = Contender.parse(trial.method)
        self._budget = Budget(float(dict(self._contender.options)["bits"]), steps, policy)
        self._cosines: list[float] = []
        self._averaged = 0

    def _average(self) -> None:
        if self._averaged % WINDOW == 0:
            if self._cosines:
                self._budget.saw(mean(self._cosines))
            self._cosines.clear()
            self._go_by(self._budget.window())
        dense = torch.stack(self._flat).mean(0)
        super()._average()
        self._cosines.append(float(torch.cosine_similarity(self._flat[0], dense, dim=0)))
        self._averaged += 1

    def _go_by(self, bits: float) -> None:
        options = tuple((name, bits if name == "bits" else value) for name, value in self._contender.options)
        configuration = replace(self._contender, options=options).configuration(self._trial.seed)
        for engine in self._world.engines if self._world else ():
            engine.change(configuration)


def row(name: str, results: list[Result]) -> tuple[str, ...]:
    """What trainings with several seeds came to."""

    def spread(figures: list[float], digits: int) -> str:
        return f"{mean(figures):.{digits}f} ± {stdev(figures):.{digits}f}"

    fewer = mean(each.dense_bytes / each.sent_bytes for each in results)
    accuracies, losses = [100 * each.accuracy for each in results], [each.loss for each in results]
    return name, f"{fewer:.1f}", spread(accuracies, 2), spread(losses, 4)


def main(workload: Any, optimizer: Any, method: str, rate: str, steps: str = "") -> None:
    """Trains with each policy and seed, and prints the table."""
    console = Console()
    count = int(steps or STEPS[workload])
    shown = table(f"{workload}, {optimizer}, {method}", "bits", "x fewer bytes", "accuracy in %", "loss in bits")
    with bars(console) as progress:
        for name, policy in POLICIES.items():
            results = []
            for seed in SEEDS:
                bar = progress.add_task(f"{name}, seed {seed}", total=count, news="")
                trial = Trial(workload, optimizer, 4, method, float(rate), seed)
                averages = partial(Spending, policy=policy)
                results.append(run(trial, count, partial(_show, progress, bar), averages=averages))
                progress.remove_task(bar)
            shown.add_row(*row(name, results))
    console.print(shown)


def _show(progress: Any, bar: Any, done: int) -> None:
    progress.update(bar, completed=done)


if __name__ == "__main__":
    main(*sys.argv[1:])
