"""Momentum that is compressed in place of the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gradwire import kernels
from gradwire.errors import ConfigurationError
from gradwire.layout import Block, Slot
from gradwire.memory.feedback import Feedback, Memory, NoMemory
from gradwire.memory.kind import Kind
from gradwire.memory.store import Store


@dataclass(frozen=True, eq=False, kw_only=True)
class _MomentumFeedback(Feedback):
    momentum: Tensor
    decay: float

    def admit(self, block: Block, gradient: Tensor) -> Tensor:
        """``m = decay * m + (1 - decay) * g``; a gradient that is not finite is itself what to send."""
        finite = kernels.accumulate(block, gradient, self.momentum, self.decay, 1 - self.decay)
        return self.momentum if finite else gradient


@dataclass(frozen=True)
class Momentum(Memory):
    """The worker's momentum is sent, and nothing that was not sent is kept (Signum: Bernstein 2018, arXiv:1802.04434).

    Attributes:
        decay: Share of the momentum that stays each step, in [0, 1).
    """

    decay: float = 0.9

    def __post_init__(self) -> None:
        check_decay("decay", self.decay)

    def feedback(self, store: Store, field: str, slots: Sequence[Slot], numel: int, kind: Kind = Kind.MEAN) -> Feedback:
        """Keeps one float32 an element."""
        momentum = store.flat(f"{field}.momentum", slots, numel, kind)
        return _MomentumFeedback(None, momentum=momentum, decay=self.decay)

    def owner(self) -> Memory:
        """The average of momenta needs none of its own."""
        return NoMemory()

    def __str__(self) -> str:
        return f"momentum(decay={self.decay})"


def check_decay(name: str, decay: float) -> None:
    """Raises ConfigurationError unless ``decay`` is a share below one."""
    if not 0 <= decay < 1:
        raise ConfigurationError(f"{name}={decay!r} is out of range; choose 0 <= {name} < 1, usually 0.9")
