"""gTop-k."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradwire.codecs import index
from gradwire.codecs.index import IndexCoding
from gradwire.codecs.select import TopMagnitudes, count_for
from gradwire.memory import Feedback
from gradwire.methods.method import Context, Method
from gradwire.methods.published import Published
from gradwire.methods.registry import register
from gradwire.routes import merge
from gradwire.wire.requests import Synchronization


@dataclass(frozen=True, eq=False)
class _State:
    context: Context
    feedback: Feedback


@register("gtopk")
@dataclass(frozen=True, kw_only=True)
class GTopK(Method):
    """The k largest magnitudes of all workers' top-k sets added up, merged pair by pair: k values whatever n.

    Local top-k, rounds of add-and-keep-k, and the rest back to the residual are as in the authors' code. There a tree
    ends at rank 0, which broadcasts: 2 log2 n rounds; here both ranks of a pair merge, which gives the same set, since
    the pairs are the same, in log2 n. There a worker's value counts as sent if its position is in the result, although
    a merge may have dropped the value and the position come back from another worker; here it then stays in that
    worker's residual, so nothing is lost. That code takes powers of two only; here n is any, and workers
    beyond a power of two fold their sets in first and are told the result last. The paper's text was not at hand.

    Attributes:
        ratio: k as a share of a segment's elements, in (0, 1].
        indices: How indices are written: ``"elias-fano"``, ``"bitmap"``, ``"raw"``, or an object of fixed size.
    """

    citation = "Shi et al. 2019, arXiv:1901.04359"
    published = Published(
        "Pairs exchange, where the paper's tree ends at one rank that broadcasts: the same result in half the rounds."
    )
    routes = ("merge",)
    memory = "residual"
    memories = ("none", "residual")
    bias = "contractive"
    wire_bits = "k * (32 + 2 + log2(d / k))"

    ratio: float = 0.001
    indices: str | IndexCoding = "elias-fano"

    def __post_init__(self) -> None:
        self.select()
        index.parse_fixed(self.indices)

    def select(self) -> TopMagnitudes:
        """The local choice."""
        return TopMagnitudes(self.ratio)

    def error_bound(self, numel: int) -> float:
        """Of one worker alone, as of top-k."""
        return 1 - count_for(numel, self.ratio) / numel

    def init(self, context: Context) -> _State:
        """Sets up the memory."""
        return _State(context, context.feedback())

    def synchronize(self, gradient: Tensor, state: _State, step: int) -> Synchronization:
        """Takes the merging route."""
        context, coding = state.context, index.parse(self.indices)
        return merge(self.select(), coding, context.block, gradient, state.feedback, context.rank, context.world_size)
