"""A flat gradient buffer, and what each of those who handle its parameters do."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradwire.layout import Block, Slot
from gradwire.memory import Feedback
from gradwire.methods import Context, Method
from gradwire.routes import Shares, two_level
from gradwire.wire import Synchronization, late


@dataclass(frozen=True, eq=False)
class Share:
    """What one method does in a buffer.

    Attributes:
        method: The method.
        context: Where it works.
        state: What it made of the context.
        offset: Where in the buffer the method's own begins, which has the context's number of elements.
        within: How the workers of a node cut its tensors, if they average them first; then the context's are this
            worker's rows, averaged with those who have the same in other nodes.
        aside: Where its tensors lie in the buffer, if the method works on a copy that has nothing else: so with the
            dense averages of what is not compressed, whose memory then has no gaps. They are small, and would hold up
            the next round of what is compressed; so they may come at the end of the step.
    """

    method: Method
    context: Context
    state: Any
    offset: int = 0
    within: Shares | None = None
    aside: Block | None = None

    def synchronize(self, gradient: Tensor, step: int) -> Synchronization:
        """Starts the average of this share of a flat buffer, ``float32[numel]``, in place."""
        if self.within is not None:
            context, numel = self.context, self.context.numel
            keys = context.key(step), context.shared_key(step)
            between = partial(self._average, step=step)
            return two_level(self.within, gradient, numel, keys, between)
        if self.aside is None:
            own = gradient[self.offset : self.offset + self.context.numel]
            return self._average(own, step)
        return late(self._synchronize_copy(self.aside.parts(gradient), step))

    def _average(self, gradient: Tensor, step: int) -> Synchronization:
        rounds = self.method.synchronize(gradient, self.state, step)
        context = self.context
        return _in_turns(rounds, context.feedback(), context.block) if context.memory.borrows else rounds

    def _synchronize_copy(self, parts: list[Tensor], step: int) -> Synchronization:
        copy = torch.cat(parts)
        yield from self._average(copy, step)
        torch._foreach_copy_(parts, list(torch.split(copy, [len(part) for part in parts])))


def _in_turns(rounds: Synchronization, feedback: Feedback, block: Block) -> Synchronization:
    """The same, with the residual put away while others go on, who use the space that it lies in."""
    answer, goes_on = None, True
    while True:
        if goes_on:
            feedback.lay_out(block)
        try:
            asked = rounds.send(answer)
        except StopIteration:
            feedback.put_away(block)
            return
        goes_on = feedback.put_away(block)
        answer = yield asked


@dataclass(eq=False)
class Unit:
    """A flat buffer that is averaged at once.

    Attributes:
        slots: All parameters, back to back.
        numel: Elements of the buffer.
    """

    slots: tuple[Slot, ...]
    numel: int
