"""Error feedback: what compression left out of one step is added to the next."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.errors import ConfigurationError
from gradwire.layout import Block, Slot
from gradwire.memory.store import Store


@dataclass(frozen=True, eq=False)
class Feedback:
    """A memory's share in one encoding.

    Compensated values are ``beta * residual + gamma * gradient``; the encoder leaves what it did not send in
    ``residual``. Without a residual they are the gradient itself, and nothing is kept.

    Attributes:
        residual: ``float32``, laid out as the gradient buffer; or None.
        beta: Weight of the residual.
        gamma: Weight of the gradient.
    """

    residual: Tensor | None
    beta: float = 1.0
    gamma: float = 1.0

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
    """What a worker remembers of the gradients it did not send."""

    @abstractmethod
    def feedback(self, store: Store, field: str, slots: Sequence[Slot], numel: int) -> Feedback:
        """Sets up the memory of one flat buffer.

        Args:
            store: Where tensors are kept.
            field: What to keep them as.
            slots: The parameters in the buffer that are compressed.
            numel: Elements of the buffer.
        """


@dataclass(frozen=True)
class NoMemory(Memory):
    """Compress the gradient as it is."""

    def feedback(self, store: Store, field: str, slots: Sequence[Slot], numel: int) -> Feedback:
        """Keeps nothing."""
        return NONE

    def __str__(self) -> str:
        return "none"


@dataclass(frozen=True)
class Residual(Memory):
    """Error feedback (Seide et al. 2014; Karimireddy et al. 2019, arXiv:1901.09847).

    Attributes:
        beta: Weight of the residual in the compensated gradient, in [0, 1].
        gamma: Weight of the gradient, positive.
    """

    beta: float = 1.0
    gamma: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.beta <= 1:
            raise ConfigurationError(f"beta={self.beta!r} is out of range; choose 0 <= beta <= 1, usually 1")
        if not 0 < self.gamma < math.inf:
            raise ConfigurationError(f"gamma={self.gamma!r} is out of range; choose a positive weight, usually 1")

    def feedback(self, store: Store, field: str, slots: Sequence[Slot], numel: int) -> Feedback:
        """Keeps one float32 an element."""
        return Feedback(store.flat(field, slots, numel), self.beta, self.gamma)

    def __str__(self) -> str:
        return "residual" if self == Residual() else f"residual(beta={self.beta}, gamma={self.gamma})"


def parse(memory: str | Memory) -> Memory:
    """Reads ``none`` or ``residual``.

    Raises:
        ConfigurationError: If ``memory`` is neither these nor a memory.
    """
    match memory:
        case Memory():
            return memory
        case "none":
            return NoMemory()
        case "residual":
            return Residual()
    raise ConfigurationError(
        f"memory={memory!r} is not known; choose 'none', 'residual', or an object such as "
        "gradwire.memory.Residual(beta=0.9)"
    )
