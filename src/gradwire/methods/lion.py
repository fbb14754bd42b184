"""Distributed Lion."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor

from gradwire import kernels
from gradwire.deferred import chosen
from gradwire.layout import Block
from gradwire.memory import Feedback
from gradwire.memory.momentum import check_decay
from gradwire.methods.method import CodecState, Context
from gradwire.methods.registry import register
from gradwire.methods.signsgd import SignSGD


@dataclass(frozen=True, eq=False, kw_only=True)
class _LionFeedback(Feedback):
    momentum: Tensor
    update: Tensor
    beta1: float
    beta2: float

    def before_encode(self, block: Block, gradient: Tensor) -> Tensor:
        """``u = beta1 m + (1 - beta1) g``, then ``m = beta2 m + (1 - beta2) g``; a bad gradient goes as it is."""
        for part, kept in zip(block.parts(self.update), block.parts(self.momentum), strict=True):
            part.copy_(kept)
        finite = kernels.accumulate(block, gradient, self.update, self.beta1, 1 - self.beta1)
        kernels.accumulate(block, gradient, self.momentum, self.beta2, 1 - self.beta2, when=finite)
        return chosen(finite, self.update, gradient)


@register("lion")
@dataclass(frozen=True, kw_only=True)
class Lion(SignSGD):
    """The sign that most workers' Lion updates have, +1 or -1: Distributed Lion by majority vote.

    Each worker votes with the sign of ``beta1 m + (1 - beta1) g`` and keeps ``m = beta2 m + (1 - beta2) g``. With plain
    SGD, whose weight decay is then Lion's, it is the whole optimizer: every coordinate moves by the learning rate, so
    take a third to a tenth of Adam's. Ties are broken as for ``signsgd``. The momentum is the method's
    memory and takes no other. The paper's other form, the mean of signs, is left out.

    Attributes:
        beta1: Share of the momentum in a vote, in [0, 1).
        beta2: Share of the momentum that stays each step, in [0, 1).
    """

    citation = "Liu et al. 2024, arXiv:2404.00438; Lion: Chen et al. 2023, arXiv:2302.06675"
    memories = ("none",)

    beta1: float = 0.9
    beta2: float = 0.99

    def __post_init__(self) -> None:
        check_decay("beta1", self.beta1)
        check_decay("beta2", self.beta2)

    def init(self, context: Context) -> CodecState:
        """With the momentum as this worker's memory."""
        momentum = context.store.flat("momentum", context.block.slots, context.numel)
        update = context.store.scratch(context.numel)
        feedback = _LionFeedback(None, momentum=momentum, update=update, beta1=self.beta1, beta2=self.beta2)
        return dataclasses.replace(super().init(context), feedback=feedback)
