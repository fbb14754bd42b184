"""GradiVeQ: vector quantisation that all-reduces."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.codecs.lowrank import check_rank
from gradwire.codecs.transform import Slices, principal_components
from gradwire.errors import ConfigurationError
from gradwire.memory import Feedback, Kind
from gradwire.methods.method import Context, Method
from gradwire.methods.published import Published
from gradwire.methods.registry import register
from gradwire.wire.requests import AllReduceMean, Broadcast, Request, Synchronization


@dataclass(frozen=True, eq=False)
class _State:
    context: Context
    feedback: Feedback
    slices: list[Slices]
    moments: Tensor
    bases: Tensor


@register("gradiveq")
@dataclass(frozen=True, kw_only=True)
class GradiVeQ(Method):
    """Slices of a gradient as coordinates in a basis that is learnt now and then: linear, so coordinates all-reduce.

    For ``learn_steps`` gradients are averaged densely, and the second moment of the average's slices is added up; its
    ``rank`` principal components, as rank 0 finds them, serve for ``use_steps``. Then only ``rank`` of ``slice``
    numbers are sent, and a tail of less than a slice; with the defaults 30 % of a dense average's bytes over a whole
    turn.

    No code is public; the paper's text was read. One basis for a layer, learning on averages for 100 steps, using it
    for 400, no memory, and an eighth of the numbers meanwhile are its own. Here slices are stretches of a tensor as it
    lies in memory; there all filters' gradients of one place lie side by side, and a slice is a multiple of filters by
    depth. Here moments are about zero, of at most 64 slices a step, and every step counts alike; there they are of a
    layer's first slice, about its mean while learning, and each slice's mean is taken off before and added after. Here
    every tensor of two dimensions or more and two slices or more is taken, there convolutions alone. There the rank is
    the least that leaves 1 % of the sum of eigenvalues, learning is in 4-bit QSGD, and 2,500 dense steps come first
    (``start=2_500``).

    Attributes:
        slice: Consecutive elements that are projected together.
        rank: Coordinates kept of a slice, less than ``slice``.
        learn_steps: Steps of dense averages before a basis is used.
        use_steps: Steps that a basis is used for.
    """

    citation = "Yu et al. 2018, arXiv:1811.03617"
    published = Published(
        "The paper compresses convolutions alone, with all filters' gradients of one place side by side. It takes off "
        "each slice's mean, chooses the rank by what is lost, and learns in 4-bit QSGD after 2,500 dense steps "
        "(`start=2_500`)."
    )
    routes = ("allreduce",)
    granularities = ("layer",)
    why_granularity = "it learns a basis for each layer"
    memories = ("none", "residual", "momentum", "ef21")
    bias = "contractive"
    wire_bits = "32 * (rank * (d // slice) + d % slice)"
    learning_bits = "32 * d"

    slice: int = 512
    rank: int = 64
    learn_steps: int = 100
    use_steps: int = 400

    def __post_init__(self) -> None:
        if not (isinstance(self.slice, int) and 2 <= self.slice <= 4096):
            raise ConfigurationError(f"slice={self.slice!r} is out of range; choose 2 to 4096 elements, usually 512")
        check_rank(self.rank)
        if self.rank >= self.slice:
            raise ConfigurationError(f"rank={self.rank!r} is not below slice={self.slice!r}; choose a smaller rank")
        for name in ("learn_steps", "use_steps"):
            steps = getattr(self, name)
            if not (isinstance(steps, int) and steps >= 1):
                raise ConfigurationError(f"{name}={steps!r} is out of range; choose a whole number >= 1")

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Tensors that are no vectors and have at least two slices."""
        return len(shape) > 1 and math.prod(shape) >= 2 * self.slice

    def error_bound(self, numel: int) -> float:
        """A projection never lengthens what it projects."""
        return 1.0

    def goes_on_from(self, former: Method) -> bool:
        """Slices of another length have other moments."""
        return isinstance(former, GradiVeQ) and former.slice == self.slice

    def init(self, context: Context) -> _State:
        """Finds what was learnt."""
        names = [slot.name for slot in context.block.slots]
        moments = context.store.stacked(
            "moment", names, lambda _: torch.zeros(self.slice, self.slice, dtype=torch.float32), Kind.SHARED
        )
        bases = context.store.stacked(
            "basis", names, lambda _: torch.zeros(self.rank, self.slice, dtype=torch.float32), Kind.SHARED
        )
        slices = [Slices(slot, self.slice) for slot in context.block.slots]
        return _State(context, context.feedback(), slices, moments, bases)

    def synchronize(self, gradient: Tensor, state: _State, step: int) -> Synchronization:
        """A round, and one before it when bases are new. A zero basis was never learnt: there the average is dense."""
        turn = step % (self.learn_steps + self.use_steps)
        if turn == 0:
            state.moments.zero_()
        if turn == self.learn_steps:
            if state.context.rank == 0:
                for moment, basis in zip(state.moments, state.bases, strict=True):
                    if moment.any():
                        basis.copy_(principal_components(moment, self.rank))
            for basis, sent in zip(state.bases, (yield [Broadcast(each, 0) for each in state.bases]), strict=True):
                basis.copy_(sent)
        used = [turn >= self.learn_steps and bool(basis.any()) for basis in state.bases]

        feedback, block = state.feedback, state.context.block
        admitted = feedback.before_encode(block, gradient)
        values, finite = feedback.compensate(block, admitted)
        requests: list[Request] = []
        for slices, basis, uses in zip(state.slices, state.bases, used, strict=True):
            whole = _parameter(slices, values)
            code = slices.encode(values, basis) if uses else whole.clone()
            if not (finite and (not uses or slices.fits(code))):
                code.fill_(torch.nan)
            elif feedback.residual is not None:
                if uses:
                    slices.subtract(code, basis, feedback.residual)
                else:
                    whole.zero_()
            requests.append(AllReduceMean(code))
        feedback.after_encode(block, admitted)
        means = yield requests

        for slices, basis, moment, uses, mean in zip(
            state.slices, state.bases, state.moments, used, means, strict=True
        ):
            if uses:
                slices.decode(mean, basis, gradient)
            else:
                _parameter(slices, gradient).copy_(mean)
                slices.learn(gradient, moment)
        feedback.after_decode(block, gradient)


def _parameter(slices: Slices, buffer: Tensor) -> Tensor:
    """The whole parameter in a flat buffer."""
    return buffer[slices.slot.offset : slices.slot.stop]
