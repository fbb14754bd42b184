"""Eight bits a value, finer near zero."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradwire import kernels
from gradwire.codec import Codec
from gradwire.kernels.reference import dynamic_payload_bytes
from gradwire.layout import Block
from gradwire.memory import Feedback


@dataclass(frozen=True)
class Dynamic(Codec):
    """A sign and the nearest of 128 magnitudes, the dynamic tree of Dettmers 2016.

    Magnitudes are relative to the largest of a segment. They cover seven decades, the highest one in 64 steps. A value
    above a hundred-thousandth of the largest is off by less than half of itself; the largest one by 0.7 %.
    """

    def payload_bytes(self, block: Block) -> int:
        """A byte a position and 4 bytes a segment."""
        return dynamic_payload_bytes(block)

    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, payload: Tensor, key: int) -> None:
        """Writes scales and table entries."""
        kernels.for_device(gradient.device).dynamic_encode(
            block, gradient, feedback.residual, feedback.beta, feedback.gamma, payload
        )

    def decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """Sums scaled table entries."""
        self.check(block, payloads)
        kernels.for_device(out.device).dynamic_decode(block, payloads, out, weight)
