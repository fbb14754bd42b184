"""Sign and exponent of every value in four bits, the nearest power of two."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradwire import kernels
from gradwire.codec import Codec
from gradwire.kernels.reference import exponent_payload_bytes
from gradwire.layout import Block
from gradwire.memory import Feedback


@dataclass(frozen=True)
class Exponent(Codec):
    """The nearest of seven powers of two, or zero, as variance-based compression writes its values.

    The largest power is ``2**floor(log2 M)`` for the largest magnitude ``M`` of a segment. Larger values are cut down
    to it, and what is nearer to a power below the seventh is sent as zero. (The published coding has an eighth power,
    and leaves the rest out.) In between a value is off by a third of itself at most. It is biased and needs error
    feedback.
    """

    def payload_bytes(self, block: Block) -> int:
        """Four bits a position and 4 bytes a segment."""
        return exponent_payload_bytes(block)

    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, payload: Tensor, key: int) -> None:
        """Writes the largest powers, signs and distances."""
        kernels.for_device(gradient.device).exponent_encode(
            block, gradient, feedback.residual, feedback.beta, feedback.gamma, payload
        )

    def decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """Sums signed powers."""
        self.check(block, payloads)
        kernels.for_device(out.device).exponent_decode(block, payloads, out, weight)
