"""What a memory is, and how it works on a buffer: four calls around an encoder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.deferred import Flag, at_hand
from gradwire.layout import Block, Slot
from gradwire.memory.kind import Kind
from gradwire.memory.store import Store
from gradwire.plain import Plain

OWED = "owed"
"""The store's field for what is owed of a parameter that no memory has a place for; the next step takes it along."""

Remainder = Literal["shrinks", "stays", "grows"]
"""What becomes of what an operator leaves out when that is put through it again and again: whether it is smaller each
time, in the norm that suits the operator, never larger, or larger at times."""


@dataclass(frozen=True, eq=False)
class Feedback:
    """A memory at work on one flat buffer.

    Compensated values are ``beta * residual + gamma * gradient``; the encoder leaves what it did not send in
    ``residual``. Without a residual they are the gradient itself, and nothing is kept. What a memory does beyond that,
    it does in four calls around the encoder: :meth:`before_encode`, :meth:`masked`, :meth:`after_encode` and
    :meth:`after_decode`.

    Attributes:
        residual: ``float32``, laid out as the gradient buffer; or None.
        beta: Weight of the residual.
        gamma: Weight of the gradient.
        unbiased: Whether an encoder that has the choice is to be right on average, as it is without a residual, rather
            than to leave as little as it can.
        masks: Whether :meth:`masked` changes what :meth:`before_encode` gave.
    """

    masks: ClassVar[bool] = False

    residual: Tensor | None
    beta: float = 1.0
    gamma: float = 1.0
    unbiased: bool = False

    def before_encode(self, block: Block, gradient: Tensor) -> Tensor:
        """What the encoder is to take for the gradient: a flat buffer of the same layout.

        If a gradient value is not finite, the buffer has such a value in the same segment.
        """
        return gradient

    def masked(self, block: Block, positions: Tensor, values: Tensor) -> None:
        """Told which coordinates were sent and have nothing to wait for any more.

        Args:
            block: Which elements.
            positions: ``int64[k]``, distinct.
            values: ``float32[k]``: NaN where nothing was sent after all.
        """

    def leave(self, block: Block, positions: Tensor, values: Tensor, sent: Tensor) -> None:
        """Leaves in the residual what was not sent of some coordinates.

        Args:
            block: Which elements.
            positions: ``int64[k]``, distinct.
            values: ``float32[k]``: their compensated values, as the residual holds them; no longer of use afterwards.
            sent: ``float32[k]``: what the others will read; where it is not finite nothing counts as sent. A finite
                value that is infinite to them is forgotten, or it would be so in every later step.
        """
        if self.residual is None:
            return
        rest = values.sub_(sent)
        if not (at_hand(rest) and bool(rest.sum().isfinite())):  # where it is, all of them are
            rest.masked_fill_(rest.isinf(), 0.0)
        self.masked(block, positions, rest)
        # Storing what is left takes a third of the time of subtracting in place, which waits for memory.
        kernels.scatter(block, self.residual, positions, rest)

    def after_encode(self, block: Block, admitted: Tensor) -> None:
        """Called with what was admitted once it is encoded."""

    def lay_out(self, block: Block) -> None:
        """Fills the residual, where it lies in space of others, before a method goes on with it."""

    def put_away(self, block: Block) -> bool:
        """Takes the residual out of space of others, before they go on; whether it lay there."""
        return False

    def after_decode(self, block: Block, average: Tensor) -> None:
        """May change the decoded average, which lies in the block's elements of a flat buffer."""

    def source(self, gradient: Tensor) -> kernels.Compensated:
        """What an encoder takes: the compensated values, before they are formed."""
        return kernels.Compensated(gradient, self.residual, self.beta, self.gamma)

    def buffer(self, gradient: Tensor) -> Tensor:
        """Where compensated values lie once they are formed: in the residual, or in the gradient itself."""
        return gradient if self.residual is None else self.residual

    def compensate(self, block: Block, gradient: Tensor) -> tuple[Tensor, Flag]:
        """The compensated values of ``block``, and whether the gradient's part in them is finite.

        The values lie in a buffer laid out as ``gradient``: the gradient itself, or the residual. A gradient value that
        is not finite never enters the residual, so whoever sends has to pass on that there was one.
        """
        if self.residual is None:
            extremes = [extreme for part in block.parts(gradient) for extreme in torch.aminmax(part)]
            return gradient, torch.stack([gradient.new_zeros(()), *extremes]).isfinite().all()  # also of no values
        return self.residual, kernels.accumulate(block, gradient, self.residual, self.beta, self.gamma)


NONE = Feedback(None)
"""Nothing is remembered."""


class Memory(Plain, ABC):
    """What a worker remembers of the gradients it did not send.

    Attributes:
        masks: Whether it must be told which coordinates were sent, so that it serves sparse methods only.
        why_no_mean: Why averages of gradients that stay do not tend to their mean with it, whatever the method, if so.
    """

    masks: ClassVar[bool] = False
    why_no_mean: ClassVar[str] = ""

    @property
    def within(self) -> tuple[Memory, ...]:
        """All memories that it is made of."""
        return (self,)

    @property
    def parts(self) -> bool:
        """Whether what ranks remember must fit together.

        Then it never does again once some of them have taken in a step that is not finite on others.
        """
        return self.estimates("") is not None

    @property
    def unbiased(self) -> bool:
        """Whether it is for methods without bias only."""
        return False

    def bears(self, remainder: Remainder) -> bool:
        """Whether what it remembers stays bounded with an operator that leaves such a remainder."""
        return True

    def fitted(self, bound: float, workers: int) -> Memory:
        """The memory as it is for a method with this error bound and so many workers, where it depends on that."""
        return self

    @property
    def borrows(self) -> bool:
        """Whether its residual lies in space of others while a method goes on, and elsewhere while it waits."""
        return False

    @abstractmethod
    def feedback(self, store: Store, field: str, slots: Sequence[Slot], numel: int, kind: Kind = Kind.MEAN) -> Feedback:
        """Sets up the memory of one flat buffer.

        Args:
            store: Where tensors are kept.
            field: What to keep the residual as; other tensors start with that name.
            slots: The parameters in the buffer that are compressed.
            numel: Elements of the buffer.
            kind: Whose it is: one worker's among many, or an owner's.
        """

    def owed(self, field: str) -> tuple[str, ...]:
        """The store's fields that hold what was not sent, in units of the gradient, where it is kept as ``field``."""
        return ()

    @property
    def keeps(self) -> float:
        """Which share of what is not sent in a step it owes after it."""
        return 1.0

    def estimates(self, field: str) -> tuple[str, str] | None:
        """The store's fields of the worker's estimate of its gradient, negative, and of what all know of the mean.

        None if it is no memory of differences.
        """
        return None

    def owner(self) -> Memory:
        """What an owner of a shard remembers of the average that it compresses again."""
        return self

    def uncompressed(self) -> Memory:
        """What is left of it for tensors that are averaged densely: as if nothing were left unsent."""
        return NoMemory()


@dataclass(frozen=True)
class NoMemory(Memory):
    """Compress the gradient as it is."""

    def feedback(self, store: Store, field: str, slots: Sequence[Slot], numel: int, kind: Kind = Kind.MEAN) -> Feedback:
        """Keeps nothing."""
        return NONE

    def __str__(self) -> str:
        return "none"
