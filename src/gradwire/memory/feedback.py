"""Error feedback: what compression left out of one step is added to the next."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.errors import ConfigurationError
from gradwire.layout import Block, Slot
from gradwire.memory.kind import Kind
from gradwire.memory.store import Store
from gradwire.randomness import key_of


@dataclass(frozen=True, eq=False)
class Feedback:
    """A memory at work on one flat buffer.

    Compensated values are ``beta * residual + gamma * gradient``; the encoder leaves what it did not send in
    ``residual``. Without a residual they are the gradient itself, and nothing is kept. What a memory does beyond that,
    it does in four calls around the encoder: :meth:`admit`, :meth:`masked`, :meth:`settle` and :meth:`received`.

    Attributes:
        residual: ``float32``, laid out as the gradient buffer; or None.
        beta: Weight of the residual.
        gamma: Weight of the gradient.
    """

    residual: Tensor | None
    beta: float = 1.0
    gamma: float = 1.0

    def admit(self, block: Block, gradient: Tensor) -> Tensor:
        """What the encoder is to take for the gradient: a flat buffer of the same layout.

        If a gradient value is not finite, the buffer has such a value in the same segment.
        """
        return gradient

    def masked(self, block: Block, positions: Tensor) -> None:
        """Told by encoders that send some coordinates which ones, ``int64[k]``, if all went well."""

    def settle(self, block: Block, gradient: Tensor) -> None:
        """Called with the gradient once it is encoded."""

    def received(self, block: Block, average: Tensor) -> None:
        """May change the decoded average, which lies in the block's elements of a flat buffer."""

    def buffer(self, gradient: Tensor) -> Tensor:
        """Where compensated values lie once they are formed: in the residual, or in the gradient itself."""
        return gradient if self.residual is None else self.residual

    def compensate(self, block: Block, gradient: Tensor) -> tuple[Tensor, bool]:
        """The compensated values of ``block``, and whether the gradient's part in them is finite.

        The values lie in a buffer laid out as ``gradient``: the gradient itself, or the residual. A gradient value that
        is not finite never enters the residual, so whoever sends has to pass on that there was one.
        """
        if self.residual is None:
            extremes = [extreme for part in block.parts(gradient) for extreme in torch.aminmax(part)]
            return gradient, bool(torch.stack(extremes).isfinite().all())
        kernel = kernels.for_device(gradient.device)
        return self.residual, kernel.accumulate(block, gradient, self.residual, self.beta, self.gamma)


NONE = Feedback(None)
"""Nothing is remembered."""


class Memory(ABC):
    """What a worker remembers of the gradients it did not send.

    Attributes:
        masks: Whether it must be told which coordinates were sent, so that it serves sparse methods only.
        parts: Whether what ranks remember must fit together, and never does again once some of them have taken in a
            step that is not finite on others.
    """

    masks: ClassVar[bool] = False
    parts: ClassVar[bool] = False

    @property
    def borrows(self) -> bool:
        """Whether its residual lies in space that other buffers use, too, except from ``admit`` to ``settle``."""
        return False

    @abstractmethod
    def feedback(self, store: Store, field: str, slots: Sequence[Slot], numel: int) -> Feedback:
        """Sets up the memory of one flat buffer.

        Args:
            store: Where tensors are kept.
            field: What to keep the residual as; other tensors start with that name.
            slots: The parameters in the buffer that are compressed.
            numel: Elements of the buffer.
        """

    def owed(self, field: str) -> tuple[str, ...]:
        """The store's fields that hold what was not sent, in units of the gradient, where it is kept as ``field``."""
        return ()

    def owner(self) -> Memory:
        """What an owner of a shard remembers of the average that it compresses again."""
        return self


@dataclass(frozen=True)
class NoMemory(Memory):
    """Compress the gradient as it is."""

    def feedback(self, store: Store, field: str, slots: Sequence[Slot], numel: int) -> Feedback:
        """Keeps nothing."""
        return NONE

    def __str__(self) -> str:
        return "none"


@dataclass(frozen=True, eq=False, kw_only=True)
class _HalfFeedback(Feedback):
    scratch: Tensor
    kept: Tensor
    ages: Tensor
    seed: int

    def admit(self, block: Block, gradient: Tensor) -> Tensor:
        """Lays the memory in float32 where the encoder leaves what it did not send."""
        for part, kept in zip(block.parts(self.scratch), block.parts(self.kept), strict=True):
            part.copy_(kept)
        return gradient

    def settle(self, block: Block, gradient: Tensor) -> None:
        """Rounds what the encoder left, with new random bits in every step."""
        age = int(self.ages.max()) if len(self.ages) else 0
        kernels.for_device(gradient.device).narrow(block, self.scratch, self.kept, key_of(self.seed, age))
        self.ages.add_(1)


@dataclass(frozen=True)
class Residual(Memory):
    """Error feedback (Seide et al. 2014; Karimireddy et al. 2019, arXiv:1901.09847).

    Attributes:
        beta: Weight of the residual in the compensated gradient, in [0, 1].
        gamma: Weight of the gradient, positive.
        dtype: ``"float32"``, or ``"bfloat16"`` for half the memory. Then what was not sent is rounded at random to a
            neighbour in bfloat16, so that on average the memory is what was not sent and it is never further off than
            the two neighbours lie apart. All buckets share float32 scratch space as large as the largest of them, so
            nothing is gained where one buffer holds the whole model. For methods that write all they send at once.
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

    def feedback(self, store: Store, field: str, slots: Sequence[Slot], numel: int) -> Feedback:
        """Keeps one float32 or bfloat16 an element, and with the latter a counter for each parameter."""
        if not self.borrows:
            return Feedback(store.flat(field, slots, numel), self.beta, self.gamma)
        kept, scratch = store.flat(field, slots, numel, dtype=torch.bfloat16), store.scratch(numel)
        ages = torch.zeros(0, dtype=torch.int64)
        if slots:
            names = [slot.name for slot in slots]
            ages = store.stacked(f"{field}.age", names, lambda name: ages.new_zeros(()), Kind.SHARED)
        seed = Slot(f"rounding of {field}", (), 0).stream
        return _HalfFeedback(scratch, self.beta, self.gamma, scratch=scratch, kept=kept, ages=ages, seed=seed)

    def owed(self, field: str) -> tuple[str, ...]:
        """The residual."""
        return (field,)

    def __str__(self) -> str:
        kind = ", dtype=bfloat16" if self.borrows else ""
        return "residual" if self == Residual() else f"residual(beta={self.beta}, gamma={self.gamma}{kind})"
