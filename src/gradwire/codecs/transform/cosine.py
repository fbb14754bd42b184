"""The cosine transform of small chunks of a matrix, as in image compression."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gradwire.layout import Block, Granularity, Slot

STRIP = 1 << 18
"""Values that are transformed at a time, so that they stay in the cache."""


@dataclass(frozen=True)
class Chunks:
    """A parameter as a matrix of chunks of one size.

    The parameter's first dimension is the matrix's rows; a parameter of one dimension is one row. A chunk's sides are
    the largest divisors of the matrix's that are not above a limit. Coefficients take the place of the values, chunk
    after chunk.

    Attributes:
        slot: Where the parameter lies.
        down: Chunks from top to bottom.
        across: Chunks from left to right.
        n: Rows of a chunk.
        m: Columns of a chunk.
    """

    slot: Slot
    down: int
    across: int
    n: int
    m: int

    @classmethod
    def of(cls, slot: Slot, limit: int) -> Chunks:
        """Cuts a parameter into chunks of at most ``limit`` by ``limit`` values."""
        n, m = chunk_sides(slot.shape, limit)
        rows = slot.shape[0] if len(slot.shape) > 1 else 1
        return cls(slot, rows // n, slot.numel // rows // m, n, m)

    @property
    def slots(self) -> list[Slot]:
        """Where the coefficients of each chunk lie."""
        size = self.n * self.m
        return [
            Slot(f"chunk {number} of {self.slot.name}", (size,), self.slot.offset + number * size)
            for number in range(self.down * self.across)
        ]

    def transform(self, buffer: Tensor) -> None:
        """Puts the coefficients in the place of the values."""
        left, right = cosines(self.n, buffer.device), cosines(self.m, buffer.device).T
        for values, first, second in self._strips(buffer):
            second.copy_(values)
            torch.mm(second.view(-1, self.m), right, out=first.view(-1, self.m))
            self._mix_rows(left, first, second)
            values.view(-1, self.across, self.n, self.m).copy_(
                second.view(-1, self.n, self.across, self.m).permute(0, 2, 1, 3)
            )

    def invert(self, buffer: Tensor) -> None:
        """Puts the values in the place of the coefficients."""
        left, right = cosines(self.n, buffer.device).T, cosines(self.m, buffer.device)
        for values, first, second in self._strips(buffer):
            second.copy_(values)
            torch.mm(second.view(-1, self.m), right, out=first.view(-1, self.m))
            second.view(-1, self.n, self.across, self.m).copy_(
                first.view(-1, self.across, self.n, self.m).permute(0, 2, 1, 3)
            )
            self._mix_rows(left, second, first)
            values.copy_(first)

    def _mix_rows(self, left: Tensor, values: Tensor, out: Tensor) -> None:
        """Multiplies each row of chunks by a matrix from the left."""
        rows = values.view(-1, self.n, self.across * self.m)
        torch.bmm(left.expand(len(rows), -1, -1), rows, out=out.view(rows.shape))

    def _strips(self, buffer: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Some rows of chunks at a time, and twice as much scratch.

        All products are of scratch, since their last bits depend on where in memory an operand begins.
        """
        flat, row = buffer[self.slot.offset : self.slot.stop], self.n * self.across * self.m
        most = min(max(1, STRIP // row) * row, flat.numel())
        first, second = (torch.empty(most, dtype=flat.dtype, device=flat.device) for _ in range(2))
        for values in torch.split(flat, most):
            yield values, first[: values.numel()], second[: values.numel()]


def chunk_sides(shape: tuple[int, ...], limit: int) -> tuple[int, int]:
    """Rows and columns of a chunk of a parameter of this shape."""
    rows = shape[0] if len(shape) > 1 else 1
    return _largest_divisor(rows, limit), _largest_divisor(math.prod(shape) // rows, limit)


def chunk_block(chunks: list[Chunks]) -> Block:
    """The coefficients of all parameters, each chunk a segment."""
    return Block.cut([slot for each in chunks for slot in each.slots], Granularity("layer"))


@lru_cache
def cosines(size: int, device: torch.device) -> Tensor:
    """The orthonormal DCT-II of ``size`` values: its rows are the cosines."""
    numbers = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / size * numbers[:, None] * (numbers + 0.5)) * math.sqrt(2 / size)
    matrix[0] = math.sqrt(1 / size)
    return matrix.to(device, torch.float32)


def _largest_divisor(number: int, limit: int) -> int:
    return max(divisor for divisor in range(1, limit + 1) if number % divisor == 0)
