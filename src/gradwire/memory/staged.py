"""Memories that are laid out for the encoder in every step, and kept in another form between steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.layout import Block, Slot
from gradwire.memory.feedback import Feedback
from gradwire.memory.kind import Kind
from gradwire.memory.store import Store


@dataclass(frozen=True, eq=False, kw_only=True)
class StagedFeedback(Feedback):
    """The residual is a copy of what is kept, from :meth:`before_encode` to :meth:`after_encode`, which puts it away.

    Attributes:
        residual: ``float32``, holds nothing between steps.
        kept: Laid out as the residual, float32 or bfloat16.
    """

    residual: Tensor
    kept: Tensor

    def before_encode(self, block: Block, gradient: Tensor) -> Tensor:
        """Lays what is kept where the encoder leaves what it did not send."""
        self.lay_out(block)
        return gradient

    def lay_out(self, block: Block) -> None:
        """Copies what is kept."""
        for part, kept in zip(block.parts(self.residual), block.parts(self.kept), strict=True):
            part.copy_(kept)


def kept_ages(store: Store, field: str, slots: Sequence[Slot]) -> Tensor:
    """Steps that the memory kept as ``field`` has seen of each parameter, the same on all workers.

    ``int64[slots]`` on the CPU, for the host to act on.
    """
    ages = torch.zeros(0, dtype=torch.int64)
    if not slots:
        return ages
    names = [slot.name for slot in slots]
    return store.stacked(f"{field}.age", names, lambda _: ages.new_zeros(()), Kind.SHARED, ages.device)
