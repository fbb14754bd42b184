"""Error feedback: what compression left out of one step is added to the next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.errors import ConfigurationError
from gradwire.layout import Block, Slot
from gradwire.memory.feedback import Feedback, Memory, NoMemory, Remainder
from gradwire.memory.kind import Kind
from gradwire.memory.staged import StagedFeedback, kept_ages
from gradwire.memory.store import Store
from gradwire.randomness import key_of


@dataclass(frozen=True, eq=False, kw_only=True)
class _HalfFeedback(StagedFeedback):
    ages: Tensor
    seed: int
    laid: list[Block] = field(default_factory=list)

    def lay_out(self, block: Block) -> None:
        """Copies what is kept, unless that has been done."""
        if not self.laid:
            super().lay_out(block)
            self.laid.append(block)

    def after_encode(self, block: Block, admitted: Tensor) -> None:
        """Rounds what the encoder left."""
        self.put_away(block)

    def put_away(self, block: Block) -> bool:
        """Rounds what there is, with new random bits each time; what was rounded before stays as it is."""
        if not self.laid:
            return False
        self.laid.clear()
        age = int(self.ages.max()) if len(self.ages) else 0
        kernels.narrow(block, self.residual, self.kept, key_of(self.seed, age))
        self.ages.add_(1)
        return True


@dataclass(frozen=True)
class Residual(Memory):
    """Error feedback (Seide et al. 2014; Karimireddy et al. 2019, arXiv:1901.09847).

    Attributes:
        beta: Weight of the residual in the compensated gradient, in [0, 1].
        gamma: Weight of the gradient, positive.
        dtype: ``"float32"``, or ``"bfloat16"`` for half the memory. Then what was not sent is rounded at random to a
            neighbour in bfloat16, so that on average the memory is what was not sent and it is never further off than
            the two neighbours lie apart. All buckets share float32 scratch space of up to four times the largest, so
            nothing is gained where one buffer holds the whole model, as in DDP's first step. A method that waits for
            others in between has its residual rounded then, too.
    """

    beta: float = 1.0
    gamma: float = 1.0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if not 0 <= self.beta <= 1:
            raise ConfigurationError(f"beta={self.beta!r} is out of range; choose 0 <= beta <= 1, usually 1")
        if not 0 < self.gamma < math.inf:
            raise ConfigurationError(f"gamma={self.gamma!r} is out of range; choose a positive weight, usually 1")
        if self.dtype not in ("float32", "bfloat16"):
            raise ConfigurationError(f"dtype={self.dtype!r} is not possible; choose 'float32' or 'bfloat16'")

    @property
    def borrows(self) -> bool:
        """In half precision."""
        return self.dtype != "float32"

    def bears(self, remainder: Remainder) -> bool:
        """What is left must become smaller: by itself, or by ``beta``, to at most ``1 / (1 - beta)`` gradients."""
        return remainder == "shrinks" or (remainder == "stays" and self.beta < 1)

    def feedback(self, store: Store, field: str, slots: Sequence[Slot], numel: int, kind: Kind = Kind.MEAN) -> Feedback:
        """Keeps one float32 or bfloat16 an element, and with the latter a counter for each parameter."""
        if not self.borrows:
            return Feedback(store.flat(field, slots, numel, kind), self.beta, self.gamma)
        return _HalfFeedback(
            residual=store.scratch(numel),
            beta=self.beta,
            gamma=self.gamma,
            kept=store.flat(field, slots, numel, kind, torch.bfloat16),
            ages=kept_ages(store, field, slots),
            seed=Slot(f"rounding of {field}", (), 0).stream,
        )

    def owed(self, field: str) -> tuple[str, ...]:
        """The residual."""
        return (field,)

    def owner(self) -> Memory:
        """The average has the gradient's weight already."""
        return replace(self, gamma=1.0)

    def uncompressed(self) -> Memory:
        """The gradient's weight."""
        return NoMemory() if self.gamma == 1 else replace(self, dtype="float32")

    def __str__(self) -> str:
        kind = ", dtype=bfloat16" if self.borrows else ""
        return "residual" if self == Residual() else f"residual(beta={self.beta}, gamma={self.gamma}{kind})"
