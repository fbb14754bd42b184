"""Means of equally filled buckets, whose numbers may go through a sketch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradwire import kernels
from gradwire.codecs.codec import Codec
from gradwire.errors import ConfigurationError
from gradwire.kernels.reference.quantile import Form
from gradwire.layout import Block
from gradwire.memory import Feedback


@dataclass(frozen=True)
class Quantile(Codec):
    """Every value as the mean of the bucket that it falls into; the buckets of a segment hold equally many values.

    Negative values have buckets of their own, so no value changes its sign. Without a sketch the number of each value's
    bucket is written. With one, neighbouring buckets of one sign form groups, and the number of each value's group is
    written. Every group has a MinMaxSketch: a cell keeps the bucket nearest to zero of all the values hashed to it, a
    value reads the farthest from zero of its cells, one in each row, so that a collision can only make it smaller in
    magnitude, and by no more than its group is wide. Hashes change with every step.

    Attributes:
        buckets: Buckets a segment, negative and positive together: 4, 16 or 256.
        rows: Rows of a sketch, 0 for none.
        columns: Columns of all groups' sketches together, as a share of the segment's values.
        groups: Groups a segment, negative and positive together: 2, 4, 8 or 16.
    """

    buckets: int = 256
    rows: int = 0
    columns: float = 0.3
    groups: int = 8

    def __post_init__(self) -> None:
        if self.buckets not in (4, 16, 256):
            raise ConfigurationError(f"buckets={self.buckets!r} is not possible; choose 4, 16 or 256")
        if not 0 <= self.rows <= 8:
            raise ConfigurationError(
                f"rows={self.rows!r} is out of range; choose 1 to 8, usually 2, or 0 for no sketch"
            )
        if not 0 < self.columns <= 1:
            raise ConfigurationError(f"columns={self.columns!r} is out of range; choose 0 < columns <= 1, usually 0.3")
        if self.rows and self.groups not in (2, 4, 8, 16):
            raise ConfigurationError(f"groups={self.groups!r} is not possible; choose 2, 4, 8 or 16, usually 8")

    def payload_bytes(self, block: Block) -> int:
        """4 bytes a bucket, then ``log2(buckets)`` bits a value, or ``log2(groups)`` bits a value and sketches."""
        return self._form.offsets(block)[-1]

    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, payload: Tensor, key: int) -> None:
        """Sorts, writes means, and numbers or groups and sketches."""
        kernels.quantile_encode(block, feedback.source(gradient), payload, self._form, key)

    def decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """Sums means."""
        self.check(block, payloads)
        kernels.quantile_decode(block, payloads, out, weight, self._form)

    @property
    def _form(self) -> Form:
        return Form(self.buckets, self.rows, self.columns, self.groups)
