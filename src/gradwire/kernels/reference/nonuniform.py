"""Levels wherever they are wanted, drawn so that the mean is right."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.errors import ConfigurationError
from gradwire.kernels.code import Draws, Layout
from gradwire.kernels.reference.qsgd import check_bits, norm_of, uniform16


class NonUniform(NamedTuple):
    """Plus or minus one of some multiples of the Euclidean norm of a segment, so that nothing is biased.

    Of ``x = |t| / norm`` between two levels, ``l <= x < u`` with ``l`` the i-th, level ``floor(i + (x - l) / (u - l) +
    v)`` is sent, with ``v`` the middle of one of ``2**16`` equal parts of [0, 1). A code is ``number + negative *
    2**(bits - 1)``.

    Attributes:
        bits: Bits a value with its sign: 2, 4 or 8.
        levels: ``2**(bits - 1)`` of them, rising from 0 to 1, exact in float32.
    """

    bits: int
    levels: tuple[float, ...]

    @classmethod
    def powers(cls, bits: int) -> NonUniform:
        """Zero, and ``2**-s, ..., 1/2, 1`` with ``s = 2**(bits - 1) - 2``: NUQSGD's levels.

        Raises:
            ConfigurationError: If codes of so many bits cannot be packed.
        """
        check_bits(bits)
        return cls(bits, (0.0, *(2.0**-power for power in reversed(range((1 << (bits - 1)) - 1)))))

    def check(self) -> None:
        """Knows how to pack codes of 2, 4 or 8 bits, and has a level for each."""
        check_bits(self.bits)
        rising = all(low < high for low, high in pairwise(self.levels))
        if len(self.levels) != 1 << (self.bits - 1) or (self.levels[0], self.levels[-1]) != (0, 1) or not rising:
            raise ConfigurationError(
                f"levels={self.levels!r} are not possible; give {1 << (self.bits - 1)} of them for bits={self.bits}, "
                "rising from 0 to 1"
            )

    @property
    def layout(self) -> Layout:
        """``bits`` a position and 4 bytes a segment."""
        return Layout(1, self.bits)

    def measure(self, values: list[Tensor]) -> Tensor | None:
        """The norm, 0 if too small to divide by."""
        return norm_of(values)

    def put(self, t: Tensor, scale: Tensor, draws: Draws) -> Tensor:
        """The number of a level, and above it the sign."""
        x = t.abs() * (1 / scale if scale > 0 else torch.zeros_like(scale))
        levels = table(self.levels, t.device)[: len(self.levels)]
        below = torch.bucketize(x, levels[1:-1], right=True)
        at = below.float() + (x - levels[below]) / (levels[below + 1] - levels[below])
        number = (at + uniform16(draws())).int().clamp(max=len(levels) - 1)
        return number | (t < 0).int() << (self.bits - 1)

    def read(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Scaled levels."""
        return table(self.levels, codes.device)[codes] * scales[:, 0]

    def error_bound(self, count: int) -> float:
        """The most that ``E |Q(x) - x|^2 / |x|^2`` can be for ``count`` values of a segment.

        Between two levels a quarter of ``(u - l)^2 / (l u)``, which is an eighth for powers of two; below the smallest,
        ``l``, at most ``l^2 / 4`` a value, and ``l |x|_1`` in all.
        """
        _, smallest, *_ = self.levels
        between = max(((high - low) ** 2 / (4 * low * high) for low, high in pairwise(self.levels[1:])), default=0.0)
        return between + min(count * smallest**2 / 4, math.sqrt(count) * smallest)


@lru_cache
def table(levels: tuple[float, ...], device: torch.device) -> Tensor:
    """What codes stand for, as multiples of the scale: positive ones, then negative ones."""
    positive = torch.tensor(levels, dtype=torch.float32)
    return torch.cat((positive, -positive)).to(device)
