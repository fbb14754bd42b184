"""How many of the bits that are asked for each bucket gets, so that all have the same step: reverse water-filling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gradwire.layout import Float64Array, Slot
from gradwire.memory import Kind, Store

NUMEL, ASKED, WORKERS, WEIGHT, SHARE, HEARD, STEP = range(7)
"""What is kept of a parameter: its elements, the bits a value asked for and of how many workers, what its bucket is to
have of them in the next step and what it has in this one, both in relation to the mean, the step with which it was
written last, and the number of this step."""

MOST = 64.0
"""Nothing gets more than so many times the mean, or less than the mean over so many."""

ONCE = 2.0
"""It grows or falls at most so many times from one step to the next."""


@dataclass(frozen=True, eq=False)
class Budget:
    """The bits of one buffer, which it shares with all others of as many workers that ask for as many a value.

    What is written with a larger step than the mean of all that were written so far gets more in the next step, by the
    fourth root of their ratio. All of a step is settled before its first buffer is written, by what all ranks have read
    in the steps before: so it is the same on every rank, and the sum is what was asked for.

    Attributes:
        kept_as: What it is kept as, by parameter.
        store: Where.
        rows: ``float64[n, 7]``, of the parameters in the buffer.
    """

    kept_as: str
    store: Store
    rows: Float64Array

    @classmethod
    def of(cls, kept_as: str, store: Store, slots: Sequence[Slot], bits: float, workers: int) -> Budget:
        """That of a buffer in which so many workers are asked for so many bits a value."""
        first = {
            slot.name: torch.tensor([slot.numel, bits, workers, 1, 1, 0, -1], dtype=torch.float64) for slot in slots
        }
        kept = store.stacked(kept_as, list(first), first.__getitem__, Kind.SHARED, torch.device("cpu"))
        rows: Float64Array = kept.numpy()
        rows[:, ASKED], rows[:, WORKERS] = bits, workers
        return cls(kept_as, store, rows)

    def share(self, step: int) -> float:
        """Bits in relation to those asked for, in one step."""
        if self.rows[0, STEP] != step:
            together = self._together()
            mean = _mean(np.concatenate(together), WEIGHT)
            for rows in together:
                rows[:, WEIGHT] = rows[:, SHARE] = _mean(rows, WEIGHT) / mean
                rows[:, STEP] = step
        return float(self.rows[0, SHARE])

    def heard(self, step: float) -> None:
        """Takes in with which step the buffer was written; nothing of what is none, or not finite."""
        if not 0 <= step < math.inf:
            return
        self.rows[:, HEARD] = step
        known = np.concatenate(self._together())
        if len(known := known[known[:, HEARD] > 0]):
            mean = _mean(known, HEARD)
            change = math.sqrt(math.sqrt(step / mean))  # all machines round roots alike, but not all powers
            weight = float(self.rows[0, SHARE]) * min(max(change, 1 / ONCE), ONCE)
            self.rows[:, WEIGHT] = min(max(weight, 1 / MOST), MOST)

    def _together(self) -> list[Float64Array]:
        """The rows of all that share."""
        kept: list[Float64Array] = [each.numpy() for each in self.store.stacks(self.kept_as)]
        return [rows for rows in kept if (rows[0, [ASKED, WORKERS]] == self.rows[0, [ASKED, WORKERS]]).all()]


def _mean(rows: Float64Array, column: int) -> float:
    """Over the elements of some parameters."""
    return math.fsum(rows[:, NUMEL] * rows[:, column]) / math.fsum(rows[:, NUMEL])
