"""Three values, drawn so that nothing is biased."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from gradwire import kernels
from gradwire.codec import Codec
from gradwire.errors import ConfigurationError
from gradwire.kernels.reference import trits_payload_bytes
from gradwire.layout import Block
from gradwire.memory import Feedback, Remainder


@dataclass(frozen=True)
class Ternary(Codec):
    """Zero or plus or minus the scale of a segment, as TernGrad has them: five a byte.

    A value ``t`` is sent with probability ``|t| / scale``, so it is right on average where it was not clipped. The
    scale is the largest magnitude. The squared error is ``scale |t|_1 - |t|^2`` on average.

    Attributes:
        clip: Standard deviations to which a segment is clipped first, 2.5 in the paper's experiments; 0 for none. A
            segment whose values are all equal is not clipped.
    """

    clip: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.clip < math.inf:
            raise ConfigurationError(f"clip={self.clip!r} is out of range; choose clip > 0, usually 2.5, or 0 for none")

    @property
    def remainder(self) -> Remainder:
        """A value may be off by as much as the largest."""
        return "stays"

    def payload_bytes(self, block: Block) -> int:
        """A byte for five positions and 4 bytes a segment."""
        return trits_payload_bytes(block)

    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, payload: Tensor, key: int) -> None:
        """Draws and writes digits."""
        kernels.for_device(gradient.device).ternary_encode(
            block, gradient, feedback.residual, feedback.beta, feedback.gamma, payload, self.clip, key
        )

    def decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """Sums scaled digits."""
        self.check(block, payloads)
        kernels.for_device(out.device).trits_decode(block, payloads, out, weight)
