"""Momentum that is compressed in place of the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.deferred import chosen
from gradwire.errors import ConfigurationError
from gradwire.layout import Block, Slot
from gradwire.memory.feedback import Feedback, Memory, NoMemory, Remainder
from gradwire.memory.kind import Kind
from gradwire.memory.store import Store


@dataclass(frozen=True, eq=False, kw_only=True)
class _MomentumFeedback(Feedback):
    momentum: Tensor
    ahead: Tensor | None
    decay: float
    inner: Feedback

    def before_encode(self, block: Block, gradient: Tensor) -> Tensor:
        """``m = decay * m + (1 - decay) * g``; a gradient that is not finite is itself what to send."""
        finite = kernels.accumulate(block, gradient, self.momentum, self.decay, 1 - self.decay)
        if self.ahead is None:
            return self.inner.before_encode(block, chosen(finite, self.momentum, gradient))
        for part, momentum in zip(block.parts(self.ahead), block.parts(self.momentum), strict=True):
            part.copy_(momentum)
        kernels.accumulate(block, gradient, self.ahead, self.decay, 1 - self.decay)
        return self.inner.before_encode(block, chosen(finite, self.ahead, gradient))

    def after_encode(self, block: Block, admitted: Tensor) -> None:
        """The momentum is the gradient of the memory within."""
        self.inner.after_encode(block, admitted)

    def lay_out(self, block: Block) -> None:
        """What the memory within does."""
        self.inner.lay_out(block)

    def put_away(self, block: Block) -> bool:
        """What the memory within does."""
        return self.inner.put_away(block)

    def after_decode(self, block: Block, average: Tensor) -> None:
        """What the memory within makes of it."""
        self.inner.after_decode(block, average)


@dataclass(frozen=True)
class Momentum(Memory):
    """The worker's momentum is sent: Signum's with no memory within it (Bernstein 2018, arXiv:1802.04434).

    With ``memory=Residual()`` it is error feedback of local momentum, with ``nesterov=True`` that of dist-EF-blockSGDM
    (Zheng et al. 2019, arXiv:1905.10936); with ``memory=EF21()`` it is EF21-SGDM (Fatkhullin et al. 2023,
    arXiv:2305.15155), whose eta is ``1 - decay``. Use it with an optimizer that has no momentum of its own.

    ``m = decay * m + (1 - decay) * g`` is a mean of gradients. Where a paper has ``m = decay * m + g``, its learning
    rate is ``1 - decay`` times the one to take here. All starts from zero; EF21-SGDM's authors send the first gradient
    uncompressed.

    Attributes:
        decay: Share of the momentum that stays each step, in [0, 1).
        nesterov: Whether it is Nesterov's, ``decay * m + (1 - decay) * g``, at the price of one more pass.
        memory: What becomes of that part of the momentum which was not sent.
    """

    decay: float = 0.9
    nesterov: bool = False
    memory: Memory = field(default_factory=NoMemory)

    def __post_init__(self) -> None:
        check_decay("decay", self.decay)
        if not isinstance(self.memory, Memory) or self.memory.masks or isinstance(self.memory, Momentum):
            raise ConfigurationError(
                f"memory={self.memory!r} does not go within a momentum; choose gradwire.memory.Residual(), EF21(), "
                "LowPass() or Diana(), or NoMemory()"
            )

    @property
    def within(self) -> tuple[Memory, ...]:
        """The momentum, and what is within it."""
        return (self, self.memory)

    @property
    def borrows(self) -> bool:
        """Where the memory within does."""
        return self.memory.borrows

    @property
    def unbiased(self) -> bool:
        """Where the memory within asks for it."""
        return self.memory.unbiased

    def bears(self, remainder: Remainder) -> bool:
        """What the memory within does."""
        return self.memory.bears(remainder)

    def fitted(self, bound: float, workers: int) -> Memory:
        """With the memory within for this bound and so many workers."""
        return replace(self, memory=self.memory.fitted(bound, workers))

    def feedback(self, store: Store, field: str, slots: Sequence[Slot], numel: int, kind: Kind = Kind.MEAN) -> Feedback:
        """Keeps one float32 an element, Nesterov's another one that holds nothing between steps, and what is within."""
        inner = self.memory.feedback(store, field, slots, numel, kind)
        momentum = store.flat(f"{field}.momentum", slots, numel, kind)
        return _MomentumFeedback(
            residual=inner.residual,
            beta=inner.beta,
            gamma=inner.gamma,
            unbiased=inner.unbiased,
            momentum=momentum,
            ahead=torch.zeros_like(momentum) if self.nesterov else None,
            decay=self.decay,
            inner=inner,
        )

    def owed(self, field: str) -> tuple[str, ...]:
        """What the memory within owes."""
        return self.memory.owed(field)

    @property
    def keeps(self) -> float:
        """That of the memory within."""
        return self.memory.keeps

    def estimates(self, field: str) -> tuple[str, str] | None:
        """Those of the memory within, of momenta."""
        return self.memory.estimates(field)

    def owner(self) -> Memory:
        """The average of momenta needs none of its own, only what the memory within does."""
        return self.memory.owner()

    def uncompressed(self) -> Memory:
        """All of it."""
        return self

    def __str__(self) -> str:
        more = ", nesterov" if self.nesterov else ""
        if not isinstance(self.memory, NoMemory):
            more += f", memory={self.memory}"
        return f"momentum(decay={self.decay}{more})"


def check_decay(name: str, decay: float) -> None:
    """Raises ConfigurationError unless ``decay`` is a share below one."""
    if not 0 <= decay < 1:
        raise ConfigurationError(f"{name}={decay!r} is out of range; choose 0 <= {name} < 1, usually 0.9")
