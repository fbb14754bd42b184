"""Levels at powers of two, drawn so that the mean is right."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.kernels.code import Draws, Layout
from gradwire.kernels.reference.qsgd import check_bits, norm_of


class NUQSGD(NamedTuple):
    """Zero or plus or minus ``2**-s, ..., 1/2, 1`` times the Euclidean norm of a segment, so that nothing is biased.

    Above ``2**-s`` random bits are added to the fraction of ``x = |t| / norm``; below, ``2**-s`` is sent with
    probability ``x * 2**s``. A code is ``number + negative * 2**(bits - 1)``, with number 0 for zero.

    Attributes:
        bits: Bits a value with its sign: 2, 4 or 8; ``s = 2**(bits - 1) - 2``.
    """

    bits: int = 4

    def check(self) -> None:
        """Knows how to pack codes of 2, 4 or 8 bits."""
        check_bits(self.bits)

    @property
    def layout(self) -> Layout:
        """``bits`` a position and 4 bytes a segment."""
        return Layout(1, self.bits)

    def measure(self, values: list[Tensor]) -> Tensor | None:
        """The norm, 0 if too small to divide by."""
        return norm_of(values)

    def put(self, t: Tensor, scale: Tensor, draws: Draws) -> Tensor:
        """The number of a level, and above it the sign."""
        top, random = (1 << (self.bits - 1)) - 1, draws() >> 9
        x = t.abs() * (1 / scale if scale > 0 else torch.zeros_like(scale))
        number = ((x.view(torch.int32) + random.int()) >> 23) - 127 + top
        drawn = random.float() * 2.0**-23 + 2.0**-24 < x * 2.0 ** (top - 1)
        return torch.where(x < 2.0 ** (1 - top), drawn.int(), number.clamp(max=top)) | (t < 0).int() << (self.bits - 1)

    def read(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Scaled levels."""
        top = (1 << (self.bits - 1)) - 1
        levels = torch.tensor(
            [0.0, *(2.0 ** (number - top) for number in range(1, top + 1))], device=codes.device, dtype=torch.float32
        )
        return torch.cat((levels, -levels))[codes] * scales[:, 0]

    def error_bound(self, count: int) -> float:
        """The most that ``E |Q(x) - x|^2 / |x|^2`` can be for ``count`` values of a segment.

        An eighth between powers; below the smallest, ``l``, at most ``l^2 / 4`` a value, and ``l |x|_1`` in all.
        """
        smallest = 2.0 ** (2 - (1 << (self.bits - 1)))
        return 1 / 8 + min(count * smallest**2 / 4, math.sqrt(count) * smallest)
