"""Principal components of the slices of a tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.exact import length
from gradwire.layout import Block, Granularity, Slot

MOST_SAMPLES = 64
"""Slices of a tensor that are looked at in a step."""


@dataclass(frozen=True)
class Slices:
    """Stretches of ``size`` consecutive elements of a parameter, and a tail that is shorter.

    Attributes:
        slot: Where the parameter lies.
        size: Elements of a slice.
    """

    slot: Slot
    size: int

    @property
    def count(self) -> int:
        """Whole slices."""
        return self.slot.numel // self.size

    def whole(self, buffer: Tensor) -> Tensor:
        """The whole slices as rows of a matrix, a view."""
        return buffer[self.slot.offset : self.slot.offset + self.count * self.size].view(self.count, self.size)

    def tail(self, buffer: Tensor) -> Tensor:
        """What is left, a view."""
        return buffer[self.slot.offset + self.count * self.size : self.slot.stop]

    def learn(self, buffer: Tensor, moment: Tensor) -> None:
        """Adds the second moment of some slices, evenly spread, scaled so that every step counts alike."""
        samples = self.whole(buffer)[:: -(-self.count // MOST_SAMPLES)]
        largest = samples.abs().max()
        usable = largest.isfinite() & (largest > 0)
        scaled = torch.where(usable, samples / largest, 0.0)
        scaled = (scaled / torch.where(usable, length(scaled.view(-1)), 1.0)).float()
        product = torch.empty_like(moment)
        kernels.write_product(_whole(product.shape), scaled, scaled, product.view(-1), residual=None)
        moment += product

    def encode(self, buffer: Tensor, basis: Tensor) -> Tensor:
        """Coordinates of each slice in the rows of ``basis``, then the tail.

        Products round by where in memory their factors begin, so they are taken of a copy: the same bits in any buffer.
        """
        return torch.cat(((self.whole(buffer).clone() @ basis.T).view(-1), self.tail(buffer)))

    def fits(self, code: Tensor) -> bool:
        """Whether a code and what it stands for, which is no longer, are within float32's range."""
        return bool(torch.linalg.vector_norm(code, dtype=torch.float64) <= torch.finfo(torch.float32).max)

    def subtract(self, code: Tensor, basis: Tensor, buffer: Tensor) -> None:
        """Takes away what a code stands for."""
        self.whole(buffer).sub_(self._coordinates(code, basis) @ basis)
        self.tail(buffer).zero_()

    def decode(self, code: Tensor, basis: Tensor, out: Tensor) -> None:
        """Writes what a code stands for."""
        block = _whole((self.count, self.size), self.slot.offset)
        kernels.write_product(block, self._coordinates(code, basis).T.contiguous(), basis, out, residual=None)
        self.tail(out).copy_(code[self.count * len(basis) :])

    def _coordinates(self, code: Tensor, basis: Tensor) -> Tensor:
        return code[: self.count * len(basis)].view(self.count, len(basis))


def _whole(shape: tuple[int, ...], offset: int = 0) -> Block:
    """A matrix as a block of its own."""
    return Block.cut([Slot("", shape, offset)], Granularity("layer"))


def principal_components(moment: Tensor, rank: int) -> Tensor:
    """The ``rank`` directions of largest second moment, orthonormal rows, largest first.

    Its last bits depend on the machine. It runs in double precision, because a moment of values of very different sizes
    has denormal entries in single precision, with which it does not converge.
    """
    ascending: Tensor = torch.linalg.eigh(moment.double()).eigenvectors.float()
    return ascending.flip(1).T[:rank]
