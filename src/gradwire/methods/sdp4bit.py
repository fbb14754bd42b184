"""SDP4Bit's gradients."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs.quantize.smoothed import Smoothed
from gradwire.kernels import codes
from gradwire.kernels.reference.rotation import PLAIN
from gradwire.methods.published import Published
from gradwire.methods.qsgd import DrawnLevels
from gradwire.methods.registry import register


@register("sdp4bit")
@dataclass(frozen=True, kw_only=True)
class SDP4Bit(DrawnLevels):
    """QSGD's levels against the largest of 128 values, after a Hadamard transform of every 32, which spreads outliers.

    Verified against the authors' code (jindajia/SDP4Bit): the transform without random signs, 15 symmetric levels,
    stochastic rounding, blocks of 128 values for 4 bits between nodes. Within a node they send 8 bits of the same
    transform in blocks of 512, 128 in their scripts, ``inside="node:smoothed:8"``, add up, and quantise again without
    leaving the transform. There workers own shards, as with ``gradwire.compress_reduce_scatter``; here owners return
    averages to all in twice the bits. What of a tensor fills no 32 values is left as it is. Differences of weights in 4
    bits, the other half of the paper, are not here.
    """

    citation = "Jia et al. 2024, arXiv:2410.15526"
    published = Published(
        'Two levels are `inside="node:smoothed:8"`. There shards stay in full precision, and changes of parameters are '
        "gathered in 4 bits."
    )
    granularities = ("block:128", "layer", "bucket", "model")
    wire_bits = "(bits + min(8, 2 * bits)) * d + 64 * ceil(d / 128)"

    def code(self) -> codes.QSGD:
        """Evenly spaced levels."""
        return codes.QSGD(self.bits)

    def codec(self) -> Smoothed:
        """Of the transform."""
        return Smoothed(self.code())

    def worker_bound(self, numel: int) -> float:
        """A quarter of a step squared for each value, twice that for those that fill no transform."""
        return (numel + PLAIN - 1) / (4 * self.code().levels ** 2)
