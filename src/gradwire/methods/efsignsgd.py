"""EF-SignSGD."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from gradwire.codecs.quantize import Quantiser
from gradwire.errors import ConfigurationError
from gradwire.kernels import codes
from gradwire.memory import Memory
from gradwire.methods.method import CodecMethod
from gradwire.methods.published import Published
from gradwire.methods.registry import register

NORMS = {"l1": 1, "l2": 2}


@register("efsignsgd")
@dataclass(frozen=True, kw_only=True)
class EFSignSGD(CodecMethod):
    """Signs scaled by the mean magnitude, with error feedback: ``(|p|_1 / d) sign(p)``, ``p = g + e``.

    On the sharded route each owner compresses its average with an error feedback of its own, as in Zheng et al. 2019,
    arXiv:1905.10936, so both directions cost one bit a value.

    Attributes:
        norm: ``"l1"`` as published for gradients; ``"l2"``, ``(|p|_2 / sqrt(d)) sign(p)``, as 1-bit Adam and 0/1 Adam
            have it for momenta, which need not contract.
    """

    citation = "Karimireddy et al. 2019, arXiv:1901.09847"
    published = Published(
        "The paper has one worker, and residuals in units of the update: give `learning_rate=`. Owners' feedback on "
        "the way back is that of Zheng et al. 2019. A zero counts as positive, in the authors' code as zero, which one "
        "bit cannot say."
    )
    routes = ("sharded", "gather")
    memory: ClassVar[str | Memory] = "residual"
    bias = "contractive"
    wire_bits = "2 * (d + 32)"

    norm: str = "l1"

    def __post_init__(self) -> None:
        if self.norm not in NORMS:
            raise ConfigurationError(f"norm={self.norm!r} is not possible; choose 'l1' or 'l2'")

    def error_bound(self, numel: int) -> float:
        """``1 - |x|_1^2 / (d |x|_2^2)``, which is largest for a lone value; none is claimed for the other norm."""
        return 1 - 1 / numel if self.norm == "l1" else math.inf

    def codec(self) -> Quantiser:
        """One bit a value, one scale a segment."""
        return Quantiser(codes.Sign(NORMS[self.norm]))
