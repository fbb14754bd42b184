"""Every value by the mean of the values like it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradwire import kernels
from gradwire.codec import Codec
from gradwire.errors import ConfigurationError
from gradwire.kernels.reference import quantile_payload_bytes
from gradwire.layout import Block
from gradwire.memory import Feedback

_BITS = {4: 2, 16: 4, 256: 8}


@dataclass(frozen=True)
class Quantile(Codec):
    """The bucket a value lies in, and the mean of every bucket: SketchML's values, with exact quantiles.

    The values of a segment are sorted into buckets that hold equally many. (SketchML finds the edges with a sketch, and
    takes the middle of a bucket's edges for its value; the mean is nearer.) Made for the few values that a sparsifier
    chose: sorting takes time, and the means of a segment take ``4 * buckets`` bytes. It contracts: ``|t - sent|^2 <=
    |t|^2 - |sent|^2``. It is biased and needs error feedback.

    Attributes:
        buckets: How many: 4, 16 or 256.
    """

    buckets: int = 256

    def __post_init__(self) -> None:
        if self.buckets not in _BITS:
            raise ConfigurationError(f"buckets={self.buckets!r} is not possible; choose 4, 16 or 256")

    def payload_bytes(self, block: Block) -> int:
        """2, 4 or 8 bits a position, and a float a bucket and segment."""
        return quantile_payload_bytes(block, _BITS[self.buckets])

    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, payload: Tensor, key: int) -> None:
        """Sorts, and writes means and buckets."""
        kernels.for_device(gradient.device).quantile_encode(
            block, gradient, feedback.residual, feedback.beta, feedback.gamma, payload, _BITS[self.buckets]
        )

    def decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """Sums means."""
        kernels.for_device(out.device).quantile_decode(block, payloads, out, weight, _BITS[self.buckets])
