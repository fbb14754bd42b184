"""INCEPTIONN."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs.quantize.inceptionn import Inceptionn
from gradwire.methods.method import CodecMethod
from gradwire.methods.published import Published
from gradwire.methods.registry import register


@register("inceptionn")
@dataclass(frozen=True, kw_only=True)
class INCEPTIONN(CodecMethod):
    """Values in 32, 16, 8 or 0 bits by their exponents, under an absolute error bound.

    From one on a value is sent as it is, below the bound not at all; half way between their exponents 16 bits become 8.
    These edges are those of the public GRACE code; neither the paper nor code of its authors was at hand. There
    mantissas of both lengths are shifted as far as that of a value of one is, so that 8 bits miss the bound. Here each
    length begins at the largest value that it has to hold, and no error reaches the bound. Where steps of the bound do
    not reach up to the edges, with bounds below ``2**-14``, the classes end before. Payloads are as long on every rank:
    what the room leaves over is sent as zeros.

    Attributes:
        bound: The error bound, a power of two; the paper takes 2**-10, 2**-8 and 2**-6.
        room: Bits a value, tags aside, that a payload has room for in the first step, and at most; later ones have room
            for a quarter more than was wanted in the step before. Where it does not suffice, the bound is doubled, and
            among values that are alike the last ones wait for a memory to make them larger.
    """

    citation = "Li et al. 2018, MICRO, doi:10.1109/MICRO.2018.00023"
    published = Published(
        "The paper's is for a network card that adds on the way around a ring. Mantissas of 8 and 16 bits are each "
        "shifted as their own largest value needs, so that errors stay below the bound."
    )
    routes = ("gather",)
    memories = ("none", "residual", "momentum", "lowpass")
    bias = "biased"
    wire_bits = "(2 + room) * d + 128"

    bound: float = 2.0**-10
    room: int = 16

    def __post_init__(self) -> None:
        self.codec()

    def codec(self) -> Inceptionn:
        """Shifted mantissas."""
        return Inceptionn(self.bound, self.room)

    def error_bound(self, numel: int) -> float:
        """Magnitudes are cut off, at worst to nothing."""
        return 1.0
