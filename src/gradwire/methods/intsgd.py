"""IntSGD."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.errors import ConfigurationError
from gradwire.granularity import Granularity
from gradwire.layout import Block
from gradwire.memory import Feedback, Kind
from gradwire.methods.method import Context, Method
from gradwire.methods.published import Published
from gradwire.methods.registry import register
from gradwire.routes import SharedLevels, integer
from gradwire.wire.requests import AllReduceSum, Synchronization

_TINY = 1e-16
"""What the authors' code adds to a mean square that may be zero."""


@dataclass(eq=False)
class _State:
    """What the averages of before say of the next.

    Attributes:
        layers: The block, cut into its parameters.
        squares: ``float64[layers]``: moving means of their averages' squared norms; -1 where there was none yet.
        numels: ``int64[segments]``: values of each segment.
        known: Whether all are known to have one.
    """

    context: Context
    feedback: Feedback
    layers: Block
    squares: Tensor
    numels: Tensor
    known: bool = False


@register("intsgd")
@dataclass(frozen=True, kw_only=True)
class IntSGD(Method):
    """Stochastic rounding to integers of a step that all workers know from past averages: one round, and no scales.

    The step of a segment of d values is ``sqrt(2 n r / d)``, where r is the moving mean of its average's squared norm:
    rounding adds a variance of at most ``r / 2`` to the next average, whatever n. That is the block-wise form of the
    paper for plain SGD, whose updates are its rate times these averages. Integers are cut off where n workers' sum
    would leave the byte, at ``127 // n`` on either side, as in the authors' code, bokunwang1/intsgd: a bias for a
    segment with few large values. An average less than half as long as r says takes its place, or a single loud step
    would make dozens after it too coarse. A byte a segment says whether a worker's values are finite.

    Attributes:
        beta: Of the moving mean.
    """

    citation = "Mishchenko et al. 2021, arXiv:2102.08374"
    published = Published(
        "A step for every layer is the paper's block-wise form. Its first step is not compressed; here it takes the "
        "largest magnitude for a scale, as `globalqsgd` does. Averages stand for the parameters' changes, and the mean "
        "falls faster.",
        {"granularity": "model"},
    )
    routes = ("allreduce",)
    granularities = ("layer", "bucket", "model")
    why_granularity = "it keeps a number for each parameter"
    memories = ("none", "momentum")
    wire_bits = "8 * d + 32"

    beta: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1:
            raise ConfigurationError(f"beta={self.beta!r} is out of range; choose 0 <= beta < 1")

    def init(self, context: Context) -> _State:
        """Finds what was kept.

        Raises:
            ConfigurationError: If the sums of so many workers do not fit a byte.
        """
        _CODE.levels_for(context.world_size)
        layers = Block.cut(context.block.slots, Granularity("layer"))
        names = [layers.slots[slot].name for slot in layers.slot_of_run]
        unknown = torch.tensor(-1.0, dtype=torch.float64)
        squares = context.store.stacked("square", names, lambda _: unknown, Kind.SHARED)
        numels = torch.from_numpy(context.block.segment_numels).to(squares.device)
        return _State(context, context.feedback(), layers, squares, numels)

    def synchronize(self, gradient: Tensor, state: _State, step: int) -> Synchronization:
        """A round; two as long as a parameter had no average yet, which the host looks at until all have one."""
        context, feedback, key = state.context, state.feedback, state.context.key(step)
        block, workers = context.block, context.world_size
        state.known = state.known or bool((state.squares >= 0).all())
        if not state.known:
            yield from integer(_CODE, block, gradient, feedback, key, workers)
        else:
            admitted = feedback.before_encode(block, gradient)
            spoiled = ~_CODE.scales(block, admitted, feedback).isfinite()
            scales = self._scales(state)
            own = scales.masked_fill(spoiled, torch.inf)
            codes = _CODE.encode(block, admitted, feedback, own, workers, key, more=block.segment_count)
            size = len(codes) - block.segment_count
            codes[size:] = spoiled
            feedback.after_encode(block, admitted)
            codes = yield AllReduceSum(codes)
            _CODE.decode(block, scales.masked_fill(codes[size:] > 0, torch.inf), codes[:size], gradient, workers)
            feedback.after_decode(block, gradient)
        self._learn(gradient, state)

    def _scales(self, state: _State) -> Tensor:
        """The largest magnitude of each segment that is not cut off: finite, or no average would be ever again."""
        block, workers = state.context.block, state.context.world_size
        joined = block.segment_count < len(state.squares)
        squares = state.squares.cumsum(0)[-1:] if joined else state.squares
        scales = _CODE.levels_for(workers) * (2 * workers * (squares + _TINY) / state.numels).sqrt()
        return scales.clamp(max=torch.finfo(torch.float32).max).float()

    def _learn(self, gradient: Tensor, state: _State) -> None:
        norms = torch.empty(len(state.squares), dtype=torch.float32, device=gradient.device)
        kernels.euclidean_norms(state.layers, gradient, norms)
        new, old = norms.double().square(), state.squares
        moved = self.beta * old + (1 - self.beta) * new
        mean = torch.where((old > 0) & (new > old / 4), moved, new)
        old.copy_(torch.where(new.isfinite(), mean, old))


_CODE = SharedLevels(8)
