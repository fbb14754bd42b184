"""Three values, the nearest one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradwire import kernels
from gradwire.codec import Codec
from gradwire.errors import ConfigurationError
from gradwire.kernels.reference import trits_payload_bytes
from gradwire.layout import Block
from gradwire.memory import Feedback


@dataclass(frozen=True)
class ThreeLevel(Codec):
    """Zero or plus or minus ``M``, whichever is nearest, as 3LC has them: five a byte.

    ``M`` is the sparsity times the largest magnitude of a segment. It is biased and needs error feedback.

    Attributes:
        sparsity: How sparse, in [1, 2): a value is sent if it exceeds ``sparsity / 2`` of the largest.
    """

    sparsity: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.sparsity < 2:
            raise ConfigurationError(f"sparsity={self.sparsity!r} is out of range; choose 1 <= sparsity < 2, usually 1")

    def payload_bytes(self, block: Block) -> int:
        """A byte for five positions and 4 bytes a segment."""
        return trits_payload_bytes(block)

    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, payload: Tensor, key: int) -> None:
        """Rounds and writes digits."""
        kernels.for_device(gradient.device).three_level_encode(
            block, gradient, feedback.residual, feedback.beta, feedback.gamma, payload, self.sparsity
        )

    def decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """Sums scaled digits."""
        self.check(block, payloads)
        kernels.for_device(out.device).trits_decode(block, payloads, out, weight)
