"""Our own: a dead-zone quantiser with one step for the whole model, and entropy coding."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs.codec import Codec
from gradwire.codecs.quantize import DeadZone as Levels
from gradwire.codecs.quantize import Dithered as DitheredLevels
from gradwire.codecs.quantize import SubspaceDeadZone
from gradwire.methods.method import CodecMethod, Context
from gradwire.methods.registry import register
from gradwire.policy import DensePolicy

EVERYTHING = DensePolicy(below=0, vectors=False)
"""Biases and norms are coded as well: their energy is weighed against that of all others, and in float32 they would be
a quarter of the bytes."""


class LevelsMethod(CodecMethod):
    """Levels of one step in as many bits as asked for, which buckets share so that all have the same step."""

    def _installed(self, codec: Codec, context: Context) -> Codec:
        if context.granularity.scope == "bucket" and isinstance(codec, Levels):
            codec = codec.sharing(context.store, context.block.slots, context.world_size)
        return super()._installed(codec, context)


@register("deadzone")
@dataclass(frozen=True, kw_only=True)
class DeadZone(LevelsMethod):
    """Magnitudes rounded to multiples of one step, most of them to zero, entropy-coded in the bits asked for.

    One step for all layers is reverse water-filling: each layer gets the bits that its energy deserves, as in image
    and video codecs. Codes are fixed and follow the values before, so that a payload carries no tables and large values
    that lie close together, as in gradients, are cheap. The step is the finest that fills the bits asked for, which
    buckets share, with ``granularity="bucket"``, so that they come to have one step and none waits for another. Biases
    and norms are coded, too: nothing is averaged densely unless told otherwise.

    Attributes:
        bits: For each value, 0.005 to 8; of all buckets together.
    """

    citation = "gradwire; dead-zone quantisers: Sullivan 1996, doi:10.1109/18.532878"
    granularities = ("model", "bucket", "layer", "block")
    dense = EVERYTHING
    memory = "residual"
    bias = "contractive"
    wire_bits = "max(bits * d, 160) + 64"

    bits: float = 0.1

    def __post_init__(self) -> None:
        self.codec()

    def codec(self) -> Levels:
        """Levels and their codes."""
        return Levels(self.bits)

    def error_bound(self, numel: int) -> float:
        """No value is off by more than it is."""
        return 1.0


@register("dithered")
@dataclass(frozen=True, kw_only=True)
class Dithered(LevelsMethod):
    """Magnitudes rounded by chance to a multiple of one step, entropy-coded: unbiased, so it needs no memory.

    Codes are those of ``deadzone``. Where those of a draw have no room, the step is made larger, and all is drawn
    again. Payloads of some 16 bytes need that for every third draw, and what is read is up to 0.6 % too small on
    average; in a model of thousands of values there is no such bias to be seen.

    Attributes:
        bits: For each value, 0.005 to 8; few bits make much noise.
    """

    citation = "gradwire; Roberts 1962, doi:10.1109/TIT.1962.1057702"
    granularities = DeadZone.granularities
    dense = EVERYTHING
    bias = "unbiased"
    wire_bits = DeadZone.wire_bits

    bits: float = 2.0

    def __post_init__(self) -> None:
        self.codec()

    def codec(self) -> DitheredLevels:
        """Levels drawn, and their codes."""
        return DitheredLevels(self.bits)

    def error_bound(self, numel: int) -> float:
        """The variance of a value is at most its magnitude times the step: that of all, the mean magnitude in steps.

        So large that ``1 / bound`` of the values are sent, in 68 bits at most, if 10 % of the room are to spare.
        """
        return 75 / self.bits


@register("subspace")
@dataclass(frozen=True, kw_only=True)
class Subspace(LevelsMethod):
    """Rows of each matrix as coordinates in a few directions that past averages had, and what is left, as ``deadzone``.

    A gradient is nearly of low rank. All ranks learn directions from the averages, a step of subspace iteration each,
    so that those take no bytes; coordinates are levels of nearly the same step as the rest, so that a layer gets as
    many as its energy deserves. So do biases and norms: nothing is averaged densely unless told otherwise. On the
    sharded route an owner has whole rows, which it splits again with the same directions.

    Attributes:
        bits: For each value, 0.005 to 8, with the coordinates' share.
        rank: Directions of each matrix, 1 to 64.
    """

    citation = "gradwire; subspace iteration: Halko et al. 2011, arXiv:0909.4061"
    granularities = ("model", "bucket")
    why_granularity = "all coordinates share a step"
    whole_rows = True
    dense = EVERYTHING
    memory = "residual"
    bias = "contractive"
    wire_bits = DeadZone.wire_bits

    bits: float = 0.1
    rank: int = 4

    def __post_init__(self) -> None:
        self.codec()

    def codec(self) -> SubspaceDeadZone:
        """Levels of coordinates and of the rest."""
        return SubspaceDeadZone(self.bits, self.rank)

    def takes_owner(self, route: str) -> bool:
        """Directions are learnt from what owners write, so theirs is the same operator."""
        return route == "gather"

    def _usual_owner(self, worker: Codec, context: Context) -> Codec | None:
        """The workers' own, as there is one set of directions."""
        return worker if context.route == "sharded" else None

    def error_bound(self, numel: int) -> float:
        """Neither rounding leaves more than there was."""
        return 1.0
