"""How much room a payload has where what is to be sent depends on the data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from gradwire.layout import Block
from gradwire.memory import Kind, Store

SPARE = 5 / 4
"""A step's capacity, relative to the most that any rank wanted to send in the step before."""

SHRINK = 1 / 2
"""A capacity never falls to less than this in one step, because a quiet step does not mean that the next one is."""


def following(capacity: float, most: float, spare: float = SPARE) -> float:
    """The capacity of the next step, in the same unit.

    Args:
        capacity: This step's.
        most: What any rank wanted at most, whether or not it fitted.
        spare: The next one relative to ``most``.
    """
    return max(spare * most, SHRINK * capacity)


@dataclass(frozen=True)
class Capacity:
    """The share of its largest size that a part of a payload may take, agreed by all ranks and kept by parameter.

    Attributes:
        kept_as: What the share is kept as.
        spare: The next step's share, relative to the most that any rank wanted.
        store: Where; there is always room for everything if None.
    """

    kept_as: str = "room"
    spare: float = SPARE
    store: Store | None = field(default=None, repr=False, compare=False)

    def bytes(self, block: Block, least: int, most: int) -> int:
        """Bytes in this step, a multiple of 4.

        Args:
            block: What the payload is of.
            least: What is always there, a multiple of 4.
            most: What is always enough, a multiple of 4.
        """
        shares = np.array([self._share_of(slot.name) for slot in block.slots])
        lengths = block.runs[:, 1]
        share = float((shares[block.slot_of_run] * lengths).sum() / lengths.sum()) if len(lengths) else 0.0
        return min(most, least + -(-math.ceil(share * (most - least)) // 4) * 4)

    def heard(self, block: Block, most: float) -> None:
        """Keeps the largest share that any rank wanted, with some to spare; the former one where that is not finite."""
        if self.store is None or not math.isfinite(most):
            return
        for slot in block.slots:
            share = min(following(self._share_of(slot.name), most, self.spare), 1.0)
            self.store.put(self.kept_as, slot.name, torch.tensor(share, dtype=torch.float64), Kind.SHARED)

    def _share_of(self, name: str) -> float:
        """The share of a parameter, as kept; all if nothing is."""
        kept = None if self.store is None else self.store.get(self.kept_as, name)
        return 1.0 if kept is None or not kept.item() else float(kept.item())


INDEX_ROOM = Capacity("index_room", spare=17 / 16)
"""For indices of varying length. A worker's gradients clump alike from step to step: lengths differ by few percent."""
