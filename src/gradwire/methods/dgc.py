"""Deep Gradient Compression."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs.select import WarmUp
from gradwire.methods.published import Published
from gradwire.methods.registry import register
from gradwire.methods.topk import TopK


@register("dgc")
@dataclass(frozen=True, kw_only=True)
class DGC(TopK):
    """Top-k of a momentum that waits for what was not sent, forgotten where it was: for an optimizer without one.

    Momentum correction, masking and local gradient clipping are the memory ``"dgc"``, whose weights
    ``memory=gradwire.memory.MaskedMomentum(nesterov=True, clip=0.25)`` changes. The paper estimates the k-th magnitude
    from a sample. Its authors' code (synxlin/deep-gradient-compression) looks for a threshold that 0.8 k or more reach;
    if 1.3 k do it takes their top-k, otherwise the first k in order of position. Here the top-k is exact.

    The momentum is of gradients alone, so an optimizer without one has none for its weight decay, which then counts a
    tenth of what it does with a momentum of 0.9: make it ten times as large. The authors' own optimizer gives weight
    decay a momentum of its own.

    Attributes:
        warmup: Steps over which the density falls from 25 % to ``ratio``; the paper takes four epochs.
    """

    citation = "Lin et al. 2018, arXiv:1712.01887"
    published = Published(
        "Not by itself: the warm-up over four epochs, whose steps only the user knows (`warmup=`), and local clipping "
        "to `n ** -0.5` of a threshold that is the task's (`memory=gradwire.memory.MaskedMomentum(clip=0.25)`). The "
        "top-k is exact, not from a sample. The authors' optimizer has momentum for its weight decay; with plain SGD "
        "make that `1 / (1 - momentum)` times as large."
    )
    memory = "dgc"

    ratio: float = 0.001
    warmup: int = 0

    def selector(self) -> WarmUp:
        """As many as the warm-up has come to."""
        return WarmUp(self.ratio, self.warmup)
