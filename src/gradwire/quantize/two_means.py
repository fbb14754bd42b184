"""One bit a value and two values to choose from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradwire import kernels
from gradwire.codec import Codec
from gradwire.kernels.reference import two_means_payload_bytes
from gradwire.layout import Block
from gradwire.memory import Feedback


@dataclass(frozen=True)
class TwoMeans(Codec):
    """Whether a value is negative, and the mean of either side of a segment, as 1-bit SGD has them.

    It is the best that two values can do once the sides are chosen, so it contracts: ``|t - sent|^2 <= |t|^2 -
    |sent|^2``. It is biased and needs error feedback.
    """

    def payload_bytes(self, block: Block) -> int:
        """One bit a position and 8 bytes a segment."""
        return two_means_payload_bytes(block)

    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, payload: Tensor, key: int) -> None:
        """Writes means and bits."""
        kernels.for_device(gradient.device).two_means_encode(
            block, gradient, feedback.residual, feedback.beta, feedback.gamma, payload
        )

    def decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """Sums means."""
        self.check(block, payloads)
        kernels.for_device(out.device).two_means_decode(block, payloads, out, weight)
