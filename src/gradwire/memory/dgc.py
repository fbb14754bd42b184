"""Deep Gradient Compression: momentum that is corrected for what was not sent yet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.deferred import chosen
from gradwire.errors import ConfigurationError
from gradwire.layout import Block, Slot
from gradwire.memory.feedback import Feedback, Memory, Remainder
from gradwire.memory.kind import Kind
from gradwire.memory.momentum import check_decay
from gradwire.memory.residual import Residual
from gradwire.memory.store import Store


@dataclass(frozen=True, eq=False, kw_only=True)
class _VelocityFeedback(Feedback):
    residual: None = None
    velocity: Tensor
    momentum: float
    nesterov: bool
    clip: float

    def before_encode(self, block: Block, gradient: Tensor) -> Tensor:
        """``u = momentum * u + g``; with Nesterov ``u = momentum * (u + g)``, and ``u + g`` is what counts."""
        _clip(block, gradient, self.clip)
        weight = self.momentum if self.nesterov else 1.0
        finite = kernels.accumulate(block, gradient, self.velocity, self.momentum, weight)
        return chosen(finite, gradient + self.velocity if self.nesterov else self.velocity, gradient)


@dataclass(frozen=True)
class _Velocity(Memory):
    momentum: float
    nesterov: bool
    clip: float

    def fitted(self, bound: float, workers: int) -> Memory:
        """As :meth:`MaskedMomentum.fitted`."""
        return replace(self, clip=self.clip / math.sqrt(workers))

    def feedback(self, store: Store, field: str, slots: Sequence[Slot], numel: int, kind: Kind = Kind.MEAN) -> Feedback:
        """Keeps one float32 an element."""
        velocity = store.flat(f"{field}.velocity", slots, numel, kind)
        return _VelocityFeedback(velocity=velocity, momentum=self.momentum, nesterov=self.nesterov, clip=self.clip)


@dataclass(frozen=True, eq=False, kw_only=True)
class _MaskedMomentumFeedback(Feedback):
    masks: ClassVar[bool] = True
    residual: Tensor
    velocity: Tensor
    momentum: float
    nesterov: bool
    clip: float

    def before_encode(self, block: Block, gradient: Tensor) -> Tensor:
        """``u = momentum * u + g``, to be added to ``v``; with Nesterov ``u = momentum * (u + g)``, ``v += u + g``."""
        _clip(block, gradient, self.clip)
        weight = self.momentum if self.nesterov else 1.0
        finite = kernels.accumulate(block, gradient, self.velocity, self.momentum, weight)
        if self.nesterov:
            kernels.accumulate(block, gradient, self.residual, 1.0, 1.0, when=finite)
        return chosen(finite, self.velocity, gradient)

    def masked(self, block: Block, positions: Tensor, values: Tensor) -> None:
        """Forgets the velocity of what was sent, so that stale momentum does not pull it on."""
        kernels.scatter(block, self.velocity, positions, torch.where(values.isnan(), values, 0.0))


@dataclass(frozen=True)
class MaskedMomentum(Memory):
    """Momentum correction and momentum factor masking (Lin et al. 2018, arXiv:1712.01887).

    The velocity ``u`` is the worker's momentum, ``v`` adds up the velocities not sent yet; what is sent comes from
    ``v``, and both are zeroed there. Use it with an optimizer that has no momentum of its own, and with ``1 / (1 -
    momentum)`` times the weight decay, of which it is no momentum.

    Attributes:
        momentum: Share of the velocity that stays each step, in [0, 1).
        nesterov: Whether the momentum is Nesterov's.
        clip: Local gradient clipping: n workers scale each parameter's gradient down to a norm of ``clip / sqrt(n)``
            before it counts; the root is the paper's, the authors' code takes each parameter's norm, and no root. Where
            a buffer is one segment the norm is of all of it, which with ``granularity="model"`` is the paper's.
            Infinite for none; then gradients near float32's largest add up beyond it, and no average is finite until
            their momentum has decayed, or with ``rollback`` ever again. Any clip, such as 1e30, prevents that.
    """

    masks: ClassVar[bool] = True
    why_no_mean: ClassVar[str] = "its momentum adds up, by as much as is not forgotten of it when it is sent"

    momentum: float = 0.9
    nesterov: bool = False
    clip: float = math.inf

    def __post_init__(self) -> None:
        check_decay("momentum", self.momentum)
        if not self.clip > 0:
            raise ConfigurationError(f"clip={self.clip!r} is out of range; choose a norm > 0, or math.inf for none")

    def bears(self, remainder: Remainder) -> bool:
        """What waits must become smaller when it is sent."""
        return remainder == "shrinks"

    def fitted(self, bound: float, workers: int) -> Memory:
        """With the share of the norm that one of so many workers has."""
        return replace(self, clip=self.clip / math.sqrt(workers))

    def feedback(self, store: Store, field: str, slots: Sequence[Slot], numel: int, kind: Kind = Kind.MEAN) -> Feedback:
        """Keeps two float32 an element."""
        velocity = store.flat(f"{field}.velocity", slots, numel, kind)
        return _MaskedMomentumFeedback(
            residual=store.flat(field, slots, numel, kind),
            velocity=velocity,
            momentum=self.momentum,
            nesterov=self.nesterov,
            clip=self.clip,
        )

    def owner(self) -> Memory:
        """The average has its momentum already; what its owner does not send waits."""
        return Residual()

    def uncompressed(self) -> Memory:
        """SGD's momentum, since nothing waits that would have to be masked: as in the authors' code."""
        return _Velocity(self.momentum, self.nesterov, self.clip)

    def __str__(self) -> str:
        more = f", clip={self.clip}" if math.isfinite(self.clip) else ""
        return f"dgc(momentum={self.momentum}{', nesterov' if self.nesterov else ''}{more})"


def _clip(block: Block, gradient: Tensor, most: float) -> None:
    """Scales gradients whose norm is larger down to ``most``, in place."""
    if math.isinf(most):
        return
    views = [gradient[slot.offset : slot.stop] for slot in block.slots]
    norms = torch.stack([torch.linalg.vector_norm(view, dtype=torch.float64) for view in views])
    if block.segment_count == 1:
        norms = norms.norm().expand_as(norms)
    for view, factor in zip(views, (most / norms).clamp(max=1).float(), strict=True):
        view.mul_(factor)
