"""Means of equally filled buckets, whose numbers may go through a sketch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradwire import kernels
from gradwire.codec import Codec
from gradwire.errors import ConfigurationError
from gradwire.kernels.reference import quantile_payload_bytes
from gradwire.layout import Block
from gradwire.memory import Feedback


@dataclass(frozen=True)
class Quantile(Codec):
    """Every value as the mean of the bucket that it falls into; the buckets of a segment hold equally many values.

    Negative values have buckets of their own, so no value changes its sign. Without a sketch the number of each value's
    bucket is written. With one, a MinMaxSketch, only the signs are: a cell keeps the number nearest to zero of all the
    values hashed to it, a value reads the farthest from zero of its cells, one in each row, so that a collision can
    only make it smaller in magnitude. Hashes change with every step.

    Attributes:
        buckets: Buckets a segment, negative and positive together: 4, 16 or 256.
        rows: Rows of the sketch, 0 for none.
        columns: Columns of the sketch, as a share of the segment's values.
    """

    buckets: int = 256
    rows: int = 0
    columns: float = 0.3

    def __post_init__(self) -> None:
        if self.buckets not in (4, 16, 256):
            raise ConfigurationError(f"buckets={self.buckets!r} is not possible; choose 4, 16 or 256")
        if not 0 <= self.rows <= 8:
            raise ConfigurationError(
                f"rows={self.rows!r} is out of range; choose 1 to 8, usually 2, or 0 for no sketch"
            )
        if not 0 < self.columns <= 1:
            raise ConfigurationError(f"columns={self.columns!r} is out of range; choose 0 < columns <= 1, usually 0.3")

    def payload_bytes(self, block: Block) -> int:
        """4 bytes a bucket, then ``log2(buckets)`` bits a value, or one bit a value and a sketch."""
        return quantile_payload_bytes(block, self.buckets, self.rows, self.columns)

    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, payload: Tensor, key: int) -> None:
        """Sorts, writes means, and numbers or a sketch."""
        kernels.quantile_encode(
            block,
            gradient,
            feedback.residual,
            feedback.beta,
            feedback.gamma,
            payload,
            self.buckets,
            self.rows,
            self.columns,
            key,
        )

    def decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """Sums means."""
        self.check(block, payloads)
        kernels.quantile_decode(block, payloads, out, weight, self.buckets, self.rows, self.columns)
