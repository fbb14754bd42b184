"""Every value in a few bits."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradwire import kernels
from gradwire.codec import Codec
from gradwire.errors import ConfigurationError
from gradwire.kernels import Code
from gradwire.layout import ALIGNMENT, Block
from gradwire.memory import Feedback


@dataclass(frozen=True)
class Quantiser(Codec):
    """Writes the values of each segment by a code.

    Attributes:
        code: One of :mod:`gradwire.kernels.codes`, or your own.
        size: Consecutive values of a run that are a segment of their own, a multiple of 8; 0 for segments as they are.
    """

    code: Code
    size: int = 0

    def __post_init__(self) -> None:
        self.code.check()
        if self.size < 0 or self.size % ALIGNMENT:
            raise ConfigurationError(
                f"bucket={self.size!r} is out of range; choose a multiple of 8, usually 512, or 0 for whole segments"
            )

    def payload_bytes(self, block: Block) -> int:
        """As its code has it."""
        return kernels.payload_bytes(self.code, self._segments(block))

    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, payload: Tensor, key: int) -> None:
        """Writes scales and codes."""
        residual, beta, gamma = feedback.residual, feedback.beta, feedback.gamma
        kernels.encode(self.code, self._segments(block), gradient, residual, beta, gamma, payload, key)

    def decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """Sums what codes stand for."""
        self.check(block, payloads)
        kernels.decode(self.code, self._segments(block), payloads, out, weight)

    def _segments(self, block: Block) -> Block:
        return block.divided(self.size) if self.size else block
