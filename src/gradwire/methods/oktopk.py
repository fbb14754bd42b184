"""Ok-Topk."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.errors import ConfigurationError
from gradwire.memory import Kind
from gradwire.methods.method import Worker
from gradwire.methods.published import Published
from gradwire.methods.registry import register
from gradwire.methods.topk import LocalTopK
from gradwire.routes import Regions, regions
from gradwire.wire.requests import Synchronization


@register("oktopk")
@dataclass(frozen=True, kw_only=True)
class OkTopk(LocalTopK):
    """A sparse all-reduce that sends fewer than 6 k words at any n: reduce by balanced regions, gather the largest.

    Each worker reduces one region of the index space; the regions are cut so that everybody's k largest values fall in
    equal numbers into each, and cut anew every 64 steps from the mean of where the workers would cut, as in the
    authors' code. Of the sums, the k largest are applied; a worker's value there leaves its residual, as in that code.
    So k or more large values of two workers that nearly cancel lose to others' sums, and keep back all else that these
    two have.

    Payloads have a size known beforehand, ``margin * k / n`` values from each rank to each other, in both rounds; what
    does not fit stays in the residual. So a threshold that is used for many steps would save nothing here, and both
    choices are exact at every step. With k >= n, a margin of 1.5 and 32-bit values this is ``3 k (n - 1) / n`` values
    and as many Elias-Fano indices.

    Verified against the authors' code (Shigangli/Ok-Topk), not the paper's text. There thresholds are exact every 32
    steps, 128 for BERT, and in between follow the counts by a factor near 1, so that these lie around k. It takes
    ``ratio=0.01`` for BERT, and 0.02 for VGG and LSTM, whose first 512 and 128 steps are dense.

    Attributes:
        margin: Room for a rank's share of the k values, as a multiple of ``k / n``, at least 1.
        recut: Steps after which regions are cut anew.
    """

    citation = "Li & Hoefler 2022, arXiv:2201.07598"
    published = Published(
        "Both choices are exact in every step, there by thresholds that are exact every 32 steps, 128 for BERT. For "
        "VGG and LSTM the authors take `ratio=0.02`, after 512 and 128 dense steps."
    )
    routes = ("regions",)
    granularities = ("model", "bucket")
    why_granularity = "its regions cut a whole index space, so that a small layer would be left to chance"
    wire_bits = "2 * k * (32 + 2 + log2(1 + d / k))"

    margin: float = 1.5
    recut: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.margin < math.inf:
            raise ConfigurationError(f"margin={self.margin!r} is out of range; choose at least 1, usually 1.5")
        if self.recut < 1:
            raise ConfigurationError(f"recut={self.recut!r} is out of range; choose at least 1 step, usually 64")

    def capacity(self, k: int, world_size: int) -> int:
        """Values that travel from one rank to another in a round."""
        return min(k, math.ceil(self.margin * k / world_size))

    def synchronize(self, gradient: Tensor, state: Worker, step: int) -> Synchronization:
        """Takes the route by regions, as they were cut last."""
        context, block = state.context, state.context.block
        name, positions = block.slots[0].name, block.positions
        capacity = self.capacity(int(self.select().counts(block).sum()), context.world_size)
        cut = Regions.even(positions, context.world_size, capacity, self.coding())
        kept = context.store.get("regions", name)
        if kept is not None and len(kept) == len(cut.edges) and int(kept[-1]) == positions:
            cut = Regions(kept.cpu().numpy(), capacity, cut.indices)
        again = step % self.recut == 0
        cut = yield from regions(
            self.select(), cut, again, block, gradient, state.feedback, context.rank, context.world_size
        )
        if again:
            context.store.put("regions", name, torch.from_numpy(cut.edges.copy()), Kind.WORLD)
