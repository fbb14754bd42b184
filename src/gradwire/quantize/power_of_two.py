"""Sign and exponent of every value, rounded stochastically so that nothing is biased."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradwire import kernels
from gradwire.codec import Codec
from gradwire.errors import ConfigurationError
from gradwire.kernels.reference import power_of_two_payload_bytes
from gradwire.layout import Block
from gradwire.memory import Feedback


@dataclass(frozen=True)
class PowerOfTwo(Codec):
    """Every value as one of the two powers of two around it, as natural compression has it.

    The larger power is taken with the probability that makes the value right on average; the squared error is at most
    1/8 of the squared value. Magnitudes above ``2**127`` count as ``2**127``. Denormal values become 0 or ``2**-126``,
    without bias.

    Attributes:
        bits: 9 for a sign and all exponents of float32; 8 for a sign and the 127 exponents below the largest of a
            segment. Smaller values become 0 or the smallest of these powers, without bias to within ``2**-24`` of it.
    """

    bits: int = 9

    def __post_init__(self) -> None:
        if self.bits not in (8, 9):
            raise ConfigurationError(f"bits={self.bits!r} is not possible; choose 9, or 8 for exponents of 7 bits")

    def payload_bytes(self, block: Block) -> int:
        """``bits`` a position, and 4 bytes a segment with 8 bits."""
        return power_of_two_payload_bytes(block, self.bits)

    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, payload: Tensor, key: int) -> None:
        """Writes exponents and signs."""
        kernels.for_device(gradient.device).power_of_two_encode(
            block, gradient, feedback.residual, feedback.beta, feedback.gamma, payload, self.bits, key
        )

    def decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """Sums signed powers."""
        self.check(block, payloads)
        kernels.for_device(out.device).power_of_two_decode(block, payloads, out, weight, self.bits)
