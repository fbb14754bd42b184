"""ZeRO++'s quantised gradients."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs.quantize import Quantiser
from gradwire.kernels import codes
from gradwire.methods.method import CodecMethod
from gradwire.methods.published import Published
from gradwire.methods.registry import register


@register("qgz")
@dataclass(frozen=True, kw_only=True)
class QgZ(CodecMethod):
    """Block-quantised gradients, rounded to the nearest of 15 levels: all-to-all, add up in float32, quantise again.

    Verified against DeepSpeed's code, ``all_to_all_quant_reduce`` and its kernels, not the paper's text: rounding
    without dithering and without error feedback, quantised, added and quantised again are as there. It does so once
    within a node and once between nodes, ``inside="node:nearest:4"``, and leaves every worker with its shard in full
    precision, which is what ZeRO needs; here one more quantisation is for the all-gather that gives everybody the
    average, and without ``inside`` there is one all-to-all among all workers.

    There 16 levels lie an eighth of the block's largest magnitude apart, from -8 to 7, so that a largest value that is
    positive loses an eighth of itself. Here 15 lie a seventh apart, as in SDP4Bit's code, whose authors note there that
    16 converged worse. There sums are float16, here float32; there a matrix has as many blocks as its longer side is
    long, or as there are workers, if they are more, and vectors are not compressed; here the granularity says.

    Attributes:
        bits: Bits a value with its sign: 2, 4 or 8.
    """

    citation = "Wang et al. 2023, ZeRO++, arXiv:2306.10209"
    published = Published(
        'There once within a node and once between nodes, `inside="node:nearest:4"`, and shards stay in full precision.'
        " DeepSpeed's 16 levels reach 7/8 of the largest magnitude above zero and all of it below; a block is as long "
        "as a matrix's shorter side."
    )
    routes = ("sharded", "gather")
    granularities = ("block:512", "layer", "bucket", "model")
    bias = "contractive"
    wire_bits = "2 * (bits * d + 32 * ceil(d / 512))"

    bits: int = 4

    def __post_init__(self) -> None:
        self.codec()

    def codec(self) -> Quantiser:
        """Levels against the largest magnitude of a block, the nearest one."""
        return Quantiser(codes.QSGD(self.bits, nearest=True))

    def error_bound(self, numel: int) -> float:
        """The worst are one value at the top level and all others half a step from zero, which are lost."""
        others, levels = numel - 1, (1 << (self.bits - 1)) - 1
        return others / (4 * levels**2 + others)
