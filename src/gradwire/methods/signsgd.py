"""SignSGD with majority vote, and with momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradwire.codecs.quantize import Quantiser
from gradwire.kernels import codes
from gradwire.methods.method import CodecMethod
from gradwire.methods.published import Published
from gradwire.methods.registry import register


@register("signsgd")
@dataclass(frozen=True, kw_only=True)
class SignSGD(CodecMethod):
    """The sign that most workers see, +1 or -1: the result is a vote, not a mean.

    Ties of an even number of workers are broken by randomness that is fair and the same on all ranks, and a worker with
    a zero votes at random. Every coordinate moves by the learning rate, so take one that is hundreds of times smaller
    than SGD's. So do small and 1-D tensors, which are voted on, too, and rows of an embedding that were not seen.
    """

    citation = "Bernstein et al. 2018, arXiv:1802.04434; majority vote: 2019, arXiv:1810.05291"
    published = Published("Ties are broken by fair draws, as are zeros.")
    routes = ("sharded", "gather")
    takes_all = True
    memories: ClassVar[tuple[str, ...]] = ("none", "residual", "momentum", "lowpass")
    why_no_mean = "a vote has no magnitude"
    wire_bits = "2 * (d + 32)"

    def codec(self) -> Quantiser:
        """One bit a value."""
        return Quantiser(codes.Vote())

    def owner_codec(self, route: str) -> Quantiser:
        """The majority is the sign of the mean of signs."""
        return Quantiser(codes.Vote())


@register("signum")
@dataclass(frozen=True, kw_only=True)
class Signum(SignSGD):
    """The majority's sign of the workers' momenta.

    The memory ``gradwire.memory.Momentum(decay)`` has the momentum; use an optimizer without one.
    """

    published = Published("Ties are broken by fair draws, as are zeros.")
    memory = "momentum"
