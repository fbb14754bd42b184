"""How long a spike goes on in averages: one step's gradients of a training are a hundred times larger than they were.

``python -m gradwire_bench.spikes gpt adamw 0.006 topk:ratio=0.01 efsignsgd`` prints a table for a workload, an
optimizer and a peak learning rate. The training goes by dense averages of what gradients were, and has 160 steps.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from torch import nn

from gradwire.engine.guards.spikes import Spikes
from gradwire.local import LocalWorld
from gradwire_bench.beside import trained
from gradwire_bench.contenders import Contender
from gradwire_bench.terminal import table
from gradwire_bench.trial import Averages, Trial, world_of

STEPS, SPIKE = 160, 100
"""Steps of the training, and the one, counted from 0, in which lines get what is a spike."""

LARGER = 100.0

CLIPPED = 4.0
"""``clip_spikes``, of every second world."""


class Spiking(Averages):
    """Dense averages, beside which each line averages the same gradients, one step's a hundred times larger.

    Args:
        net: The model.
        trial: What to train, by dense averages.
        steps: Number of steps.
        lines: What else averages.

    Attributes:
        lengths: Of each line's averages, step by step: without ``clip_spikes``, and with it.
    """

    def __init__(self, net: nn.Module, trial: Trial, steps: int, lines: Sequence[str]) -> None:
        super().__init__(net, trial, steps)
        self._worlds = [[self._world_of(line, clips) for clips in (False, True)] for line in lines]
        self.lengths: list[tuple[list[float], list[float]]] = [([], []) for _ in lines]
        self._step = 0

    def _world_of(self, line: str, clips: bool) -> LocalWorld:
        world = world_of(Contender.parse(line), self._slots, self._trial.workers, self._trial.seed)
        if clips:
            for engine in world.engines:
                engine.guards.append(Spikes(CLIPPED, [slot.name for slot in self._slots], engine))
        return world

    def _average(self) -> None:
        times = LARGER if self._step == SPIKE else 1.0
        for worlds, lengths in zip(self._worlds, self.lengths, strict=True):
            for world, found in zip(worlds, lengths, strict=True):
                gradients = [times * each for each in self._flat]
                world.average(gradients)
                found.append(gradients[0].norm().item())
        self._step += 1
        super()._average()


def traces(lengths: Sequence[float]) -> tuple[float, int]:
    """The average after the spike, as a multiple of the longest of 20 before, and how many are beyond twice that."""
    before, after = max(lengths[SPIKE - 20 : SPIKE]), lengths[SPIKE + 1 :]
    return after[0] / before, sum(length > 2 * before for length in after)


def main(workload: Any, optimizer: Any, rate: str, *lines: str) -> None:
    """Trains, and prints the table."""
    console = Console()
    made = trained(console, Spiking, lines, workload, optimizer, float(rate), STEPS)
    heads = ("next average", "longer than usual", f"clip_spikes={CLIPPED:g}: next", "longer than usual")
    shown = table(f"{workload}, {optimizer}, 4 workers: a step of gradients {LARGER:g} times as large", "line", *heads)
    for line, both in zip(lines, made.lengths, strict=True):
        figures = (text for found in map(traces, both) for text in (f"x {found[0]:.1f}", f"{found[1]} steps"))
        shown.add_row(line.replace(",", ", "), *figures)
    console.print(shown)


if __name__ == "__main__":
    main(*sys.argv[1:])
