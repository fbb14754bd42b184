"""What lines owe to one and the same training, which dense averages make: how far error feedback lags behind.

``python -m gradwire_bench.owed gpt adamw 0.006 120 deadzone:bits=0.8 deadzone:bits=0.8,granularity=bucket`` prints a
table for a workload, an optimizer, a peak learning rate and a number of steps. Lines with ``granularity=bucket`` have
eight buckets, or some of ``bucket_mb``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from gradwire_bench.beside import trained
from gradwire_bench.contenders import Contender
from gradwire_bench.terminal import table
from gradwire_bench.trial import Averages, Trial, world_of

SETTLED = 1 / 3
"""Share of the steps after which what is owed counts."""


class Owing(Averages):
    """Dense averages, beside which each line averages the same gradients.

    Args:
        net: The model.
        trial: What to train, by dense averages.
        steps: Number of steps.
        lines: What else averages.

    Attributes:
        owed: Of each line, after every step: what averages so far lack to those of dense ones, squared, as a share of
            the step's mean gradient squared.
        bytes: Of each line, what a worker sent in all steps.
    """

    def __init__(self, net: nn.Module, trial: Trial, steps: int, lines: Sequence[str]) -> None:
        super().__init__(net, trial, steps)
        contenders = map(Contender.parse, lines)
        self._worlds = [world_of(each, self._slots, trial.workers, trial.seed) for each in contenders]
        self._lacking = [torch.zeros_like(self._flat[0], dtype=torch.float64) for _ in lines]
        self.owed: list[list[float]] = [[] for _ in lines]
        self.bytes = [0.0 for _ in lines]

    def _average(self) -> None:
        mean = torch.stack(self._flat).double().mean(0)
        for line, world in enumerate(self._worlds):
            gradients = [each.clone() for each in self._flat]
            self.bytes[line] += world.average(gradients).sent_bytes
            self._lacking[line] += mean - gradients[0]
            self.owed[line].append(_squared(self._lacking[line]) / max(_squared(mean), sys.float_info.min))
        super()._average()


def _squared(values: Tensor) -> float:
    return float(values.square().sum())


def main(workload: Any, optimizer: Any, rate: str, steps: str, *lines: str) -> None:
    """Trains, and prints the table."""
    console, count = Console(), int(steps)
    made = trained(console, Owing, lines, workload, optimizer, float(rate), count)
    shown = table(f"{workload}, {optimizer}, {count} steps, 4 workers", "line", "owed", "bytes a step")
    for line, owed, sent in zip(lines, made.owed, made.bytes, strict=True):
        shown.add_row(line.replace(",", ", "), f"{fmean(owed[int(SETTLED * count) :]):.4f}", f"{sent / count:,.0f}")
    console.print(shown)


if __name__ == "__main__":
    main(*sys.argv[1:])
