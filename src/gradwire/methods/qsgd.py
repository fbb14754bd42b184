"""QSGD, and what all have that draw one of a few levels for every value."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

from gradwire.codecs.quantize import Quantiser
from gradwire.errors import ConfigurationError
from gradwire.kernels import codes
from gradwire.methods.method import CodecMethod, there_and_back
from gradwire.methods.published import Published
from gradwire.methods.registry import register


@dataclass(frozen=True, kw_only=True)
class DrawnLevels(CodecMethod):
    """Unbiased levels of a few bits; on the sharded route owners of averages write QSGD's in twice the bits, at most 8.

    Attributes:
        bits: Bits a value with its sign: 2, 4 or 8.
    """

    routes = ("sharded", "gather")
    granularities = ("block:512", "layer", "bucket", "model")
    bias = "unbiased"
    wire_bits = "(bits + min(8, 2 * bits)) * d + 64 * ceil(d / 512)"

    bits: int = 4

    def __post_init__(self) -> None:
        self.codec()

    @abstractmethod
    def code(self) -> codes.QSGD | codes.NUQSGD | codes.NonUniform:
        """The levels of a segment."""

    def codec(self) -> Quantiser:
        """A few bits a value, one scale a segment."""
        return Quantiser(self.code())

    def owner_codec(self, route: str) -> Quantiser | None:
        """Twice the bits, and the largest magnitude."""
        return Quantiser(self._owner) if route == "sharded" else None

    def error_bound(self, numel: int) -> float:
        """The workers' and the owners' levels."""
        return there_and_back(self.worker_bound(numel), self._owner.error_bound(numel))

    def worker_bound(self, numel: int) -> float:
        """The code's."""
        return self.code().error_bound(numel)

    @property
    def _owner(self) -> codes.QSGD:
        return codes.QSGD(min(8, 2 * self.bits))


@register("qsgd")
@dataclass(frozen=True, kw_only=True)
class QSGD(DrawnLevels):
    """Stochastic rounding to a few levels: unbiased, so it needs no memory.

    The defaults are the paper's practice: blocks of 512 values, there called buckets, scaled by their largest
    magnitude. There workers send to all others, and noise falls with their number. So it does on the sharded route,
    where owners of averages take twice the bits, at most 8: with as many as the workers (``owner="qsgd:4"``) the way
    back would add all the noise of one worker's rounding.

    Attributes:
        norm: ``"max"``, or ``"l2"`` as in the paper's analysis.
    """

    citation = "Alistarh et al. 2017, arXiv:1610.02132"
    published = Published(
        "Gathering costs n / 3 times as much at n workers. Elias coding is not here, and the paper leaves tensors "
        "below 10,000 elements dense: `dense=gradwire.DensePolicy(below=10_000, vectors=False)`.",
        {"route": "gather"},
    )

    norm: Literal["max", "l2"] = "max"

    def code(self) -> codes.QSGD:
        """Evenly spaced levels."""
        if self.norm not in ("max", "l2"):
            raise ConfigurationError(f"norm={self.norm!r} is not known; choose 'max' or 'l2'")
        return codes.QSGD(self.bits, self.norm == "l2")
