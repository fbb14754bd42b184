"""One bit a value."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradwire import kernels
from gradwire.codec import Codec
from gradwire.errors import ConfigurationError
from gradwire.kernels.reference import sign_payload_bytes
from gradwire.layout import Block
from gradwire.memory import Feedback


@dataclass(frozen=True)
class Sign(Codec):
    """The sign of every value and one scale a segment.

    Attributes:
        norm: ``"l1"``, the mean magnitude ``|t|_1 / d``, which loses least; or ``"l2"``, ``|t|_2 / sqrt(d)``, which
            keeps the length and loses up to twice the squared length where a few values have all of it.
    """

    norm: str = "l1"

    def __post_init__(self) -> None:
        if self.norm not in ("l1", "l2"):
            raise ConfigurationError(f"norm={self.norm!r} is not possible; choose 'l1' or 'l2'")

    def payload_bytes(self, block: Block) -> int:
        """One bit a position and 4 bytes a segment."""
        return sign_payload_bytes(block)

    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, payload: Tensor, key: int) -> None:
        """Writes scales and bits."""
        kernels.for_device(gradient.device).sign_encode(
            block, gradient, feedback.residual, feedback.beta, feedback.gamma, payload, self.norm == "l2"
        )

    def decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """Sums scaled signs."""
        self.check(block, payloads)
        kernels.for_device(out.device).sign_decode(block, payloads, out, weight)
