"""Distributed Lion, and Lion Cub."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.quantize import Quantiser
from gradwire.deferred import chosen
from gradwire.errors import ConfigurationError
from gradwire.kernels import codes
from gradwire.layout import Block
from gradwire.memory import Feedback
from gradwire.memory.momentum import check_decay
from gradwire.methods.method import CodecState, Context
from gradwire.methods.published import Published
from gradwire.methods.registry import register
from gradwire.methods.signsgd import SignSGD
from gradwire.wire.requests import AllReduceMean, Synchronization


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
    published = Published(
        "Ties are broken by fair draws, as are zeros. The mean of signs, the paper's other form, is not here."
    )
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


@register("lioncub")
@dataclass(frozen=True, kw_only=True)
class LionCub(Lion):
    """Lion's updates as whole votes of several sizes, the sign of their sum, and momenta averaged now and then.

    A worker votes on ``u = beta1 m + (1 - beta1) g`` with ``round(u / step)``, from -s to s, with a step of ``2 / s``
    of the mean magnitude of a segment of u: with three votes, s = 1, whoever is below the mean abstains. Half a step is
    a vote, either way, or a parameter of one value would never move. The sign of the sum is the average, 0 where nobody
    wins. Every ``sync`` steps momenta are averaged densely, so that workers do not drift apart; these 32 bits a value
    are not among the declared ones.

    Of the paper abstract and first figure were at hand, and its authors' code: there half a step goes to the even side,
    and votes are summed by an all-reduce of 4 bits, with s = 1, or of 8, with s = 127 / n. It averages all momenta at
    steps that it is told, and by default none, where the abstract has momenta of some layers.

    Attributes:
        bits: Bits a vote, 2, 4 or 8: s is 1, 7 or 127. With 2, five votes are in a byte.
        sync: Steps from one average of the momenta to the next; 0 for none.
    """

    citation = "Ishikawa et al. 2024, arXiv:2411.16462; Distributed Lion: Liu et al. 2024, arXiv:2404.00438"
    published = Published(
        "Votes go to owners of shares, so that their sums take no bits of their own. The authors' code averages all "
        "momenta or none, the paper's abstract those of some layers.",
        {"sync": 0},
    )
    wire_bits = "(8 * ceil(d / 5) if bits == 2 else bits * d) + 8 * ceil(d / 5) + 128"

    bits: int = 2
    sync: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        self.codec()
        if not (isinstance(self.sync, int) and self.sync >= 0):
            raise ConfigurationError(f"sync={self.sync!r} is out of range; choose a number of steps, or 0 for never")

    def codec(self) -> Quantiser:
        """Votes."""
        return Quantiser(codes.Ballot(self.bits))

    def owner_codec(self, route: str) -> Quantiser:
        """Who wins."""
        return Quantiser(codes.Ballot(signs=True))

    def synchronize(self, gradient: Tensor, state: CodecState, step: int) -> Synchronization:
        """The chosen route, and now and then an average of the momenta after it."""
        yield from super().synchronize(gradient, state, step)
        if self.sync and (step + 1) % self.sync == 0:
            kept = state.feedback.momentum if isinstance(state.feedback, _LionFeedback) else gradient  # sizes alone
            parts = state.context.block.parts(kept)
            average = yield AllReduceMean(torch.cat(parts))
            for part, mean in zip(parts, average.split([len(part) for part in parts]), strict=True):
                part.copy_(torch.where(mean.isfinite(), mean, part))
