"""gTop-k."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradwire.methods.method import Worker
from gradwire.methods.published import Published
from gradwire.methods.registry import register
from gradwire.methods.topk import LocalTopK
from gradwire.routes import merge
from gradwire.wire.requests import Synchronization


@register("gtopk")
@dataclass(frozen=True, kw_only=True)
class GTopK(LocalTopK):
    """The k largest magnitudes of all workers' top-k sets added up, merged pair by pair: k values whatever n.

    Verified against the authors' code (hclhkbu/gtopkssgd), not the paper's text: local top-k, rounds of add-and-keep-k,
    and the rest back to the residual. There a tree ends at rank 0, which broadcasts: 2 log2 n rounds; here both ranks
    of a pair merge, which gives the same set, since the pairs are the same, in log2 n. There a worker's value counts as
    sent if its position is in the result, although a merge may have dropped the value and the position come back from
    another worker; here it then stays in that worker's residual, so nothing is lost. That code takes powers of two
    only; here n is any, and workers beyond a power of two fold their sets in first and are told the result last. It
    chooses from the whole model at once, ``granularity="model"``, and takes ``ratio=0.004`` in the first epoch, 0.001
    then. By the paper's rule, k or more large values of two workers that nearly cancel lose to others' sums in every
    step, and keep back all else that these two have.
    """

    citation = "Shi et al. 2019, arXiv:1901.04359"
    published = Published(
        "Layers go out before the last gradient is there. Pairs exchange, where the paper's tree ends at one rank that "
        "broadcasts: the same result in half the rounds. The authors' code begins with an epoch at `ratio=0.004`.",
        {"granularity": "model"},
    )
    routes = ("merge",)
    wire_bits = (
        "k * (max(1, ceil(log2(workers))) * (32 + 2 + log2(d / k)) + (log2(workers) % 1 > 0) * (32 + 3 + log2(d / k)))"
    )

    ratio: float = 0.001

    def synchronize(self, gradient: Tensor, state: Worker, step: int) -> Synchronization:
        """Takes the merging route."""
        context = state.context
        return merge(
            self.select(), self.coding(), context.block, gradient, state.feedback, context.rank, context.world_size
        )
