"""One bit a value and no scale."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradwire import kernels
from gradwire.codec import Codec
from gradwire.kernels.reference import sign_payload_bytes
from gradwire.layout import Block
from gradwire.memory import Feedback


@dataclass(frozen=True)
class Vote(Codec):
    """The sign of every value, +1 or -1, as SignSGD sends it; a zero takes a random sign.

    The majority of votes is the vote on their mean. Its ties are zeros, so they are broken fairly, and equally wherever
    the same key is used. A payload is that of :class:`~gradwire.quantize.Sign` with scales of 1.
    """

    def payload_bytes(self, block: Block) -> int:
        """One bit a position and 4 bytes a segment."""
        return sign_payload_bytes(block)

    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, payload: Tensor, key: int) -> None:
        """Writes signs."""
        kernels.for_device(gradient.device).vote_encode(
            block, gradient, feedback.residual, feedback.beta, feedback.gamma, payload, key
        )

    def decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """Sums signs."""
        self.check(block, payloads)
        kernels.for_device(out.device).sign_decode(block, payloads, out, weight)
