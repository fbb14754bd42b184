"""A threshold from a fitted exponential distribution, refined on what exceeds it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.select.criterion import Thresholds
from gradwire.codecs.select.selector import check_ratio, counts_for
from gradwire.layout import Block, Float32Array, Float64Array, Int64Array, Slot
from gradwire.memory import Kind, Store

FIRST_RATIO = 0.25
"""What the first of several stages aims at."""

PERIOD = 5
"""Steps between two looks at how far from the ratio the counts were."""

TOLERANCE = 0.2
"""How far they may be, relative to the ratio, before a stage is added or taken away."""


@dataclass(frozen=True)
class ExponentialTail(Thresholds):
    """About ``ratio`` of the magnitudes: those that would exceed the threshold if they were exponentially distributed.

    One stage puts the threshold at ``-mean|t| ln(ratio)``. With M stages the first aims at a quarter; each further one
    fits an exponential to what exceeds the threshold so far, from there on, and aims at the same share of it.

    Attributes:
        ratio: Share of a segment's elements to aim at, in (0, 1].
        store: Where stages are kept, by parameter; one stage always if None.
    """

    ratio: float
    store: Store | None = None

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def installed(self, store: Store, slots: Sequence[Slot], numel: int) -> ExponentialTail:
        """With the store for stages."""
        return replace(self, store=store)

    def thresholds(self, block: Block, source: Tensor, totals: Float64Array, largest: Float32Array) -> Float32Array:
        """As many passes more as there are stages beyond the first."""
        stages = self._stages(block)
        several = (stages > 1) & (self.ratio < FIRST_RATIO)
        aims = np.where(several, FIRST_RATIO, self.ratio)
        thresholds = (0 - totals / block.segment_numels * np.log(aims)).astype(np.float32)  # 0, and not -0, at ratio 1
        shares = (self.ratio / FIRST_RATIO) ** (1 / np.maximum(stages - 1, 1))
        for stage in range(1, int(stages[several].max(initial=1))):
            going = several & (stages > stage)
            counts, sums = kernels.exceedances(block, source, np.where(going, thresholds, np.float32(np.nan)))
            going &= counts > 0
            excess = sums / np.maximum(counts, 1) - thresholds
            thresholds = np.where(going, thresholds - excess * np.log(shares), thresholds).astype(np.float32)
        return np.minimum(thresholds, largest)

    def counted(self, block: Block, counts: Int64Array) -> None:
        """Every few steps: too many take a stage away, too few add one."""
        if self.store is None:
            return
        owners = _first_slots(block)
        of_segment = np.add.reduceat(counts, block.segments[:-1])
        found = np.bincount(owners, np.maximum(of_segment, 0), len(block.slots))
        aimed = np.bincount(
            owners, counts_for(block, self.ratio) * (counts[block.segments[:-1]] >= 0), len(block.slots)
        )
        for index in np.flatnonzero(aimed).tolist():
            name = block.slots[index].name
            stages, steps, total = self._kept(name)
            steps, total = steps + 1, total + float(found[index] / aimed[index])
            if steps == PERIOD:
                step = int(total < (1 - TOLERANCE) * PERIOD) - int(total > (1 + TOLERANCE) * PERIOD)
                stages, steps, total = min(max(stages + step, 1), self._most()), 0, 0.0
            kept = torch.tensor([stages, steps, total], dtype=torch.float64)
            self.store.put("stages", name, kept, Kind.PRIVATE)

    def _most(self) -> int:
        """The most stages there can be: as many as halvings lead to the ratio."""
        return max(1, math.ceil(-math.log2(self.ratio)))

    def _kept(self, name: str) -> tuple[int, int, float]:
        """Stages, steps since the last look, and the sum of their relative counts."""
        kept = None if self.store is None else self.store.get("stages", name)
        stages, steps, total = (1.0, 0.0, 0.0) if kept is None else kept.tolist()
        return max(1, int(stages)), int(steps), total

    def _stages(self, block: Block) -> Int64Array:
        of_slot = np.array([self._kept(slot.name)[0] for slot in block.slots], dtype=np.int64)
        stages: Int64Array = of_slot[_first_slots(block)]
        return stages


def _first_slots(block: Block) -> Int64Array:
    """The parameter that keeps the state of each segment: that of its first run."""
    return block.slot_of_run[block.segments[:-1]]
