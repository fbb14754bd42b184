"""Rotations that make all coordinates alike, and the levels that suit such coordinates.

A randomised Hadamard rotation flips signs at random and mixes a power of two of values with additions alone. Whatever
the values, its coordinates are nearly normal, so levels can be chosen for that one distribution once and for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.errors import ConfigurationError
from gradwire.layout import ALIGNMENT, Block, Int64Array
from gradwire.plain import Plain
from gradwire.randomness import run_keys

CODES = 16
"""Levels that 4 bits can name."""

LEAST_OVERFLOW = 1e-15
"""Of smaller shares the outermost level is nowhere: in floats, as much as all lies below it."""


@dataclass(frozen=True)
class Levels(Plain):
    """Integers that 4-bit codes stand for: where to round normal coordinates so that codes add up as integers.

    The integers are 0 = T[0] < ... < T[15] = grain; level ``T[z]`` stands for ``reach * (2 T[z] / grain - 1)``.

    Attributes:
        grain: The largest integer, from 15 (uniform levels) to 255.
        overflow: Share of normal coordinates beyond the outermost levels, from 1e-15 to below 1: they are clamped.
    """

    grain: int = 30
    overflow: float = 1 / 32

    def __post_init__(self) -> None:
        if not (isinstance(self.grain, int) and CODES - 1 <= self.grain <= 255):
            raise ConfigurationError(f"grain={self.grain!r} is out of range; choose a whole number from 15 to 255")
        if not LEAST_OVERFLOW <= self.overflow < 1:
            raise ConfigurationError(f"overflow={self.overflow!r} is out of range; choose 1e-15 to below 1, say 1/32")

    @property
    def reach(self) -> float:
        """The outermost level, in standard deviations."""
        return NormalDist().inv_cdf(1 - self.overflow / 2)

    @property
    def table(self) -> tuple[int, ...]:
        """The symmetric integers with the least expected variance of unbiased rounding, for a normal coordinate."""
        return _optimal(self.grain, self.reach)

    @property
    def widest(self) -> float:
        """The largest gap between two levels, in standard deviations."""
        return max(np.diff(self.table).tolist()) * 2 * self.reach / self.grain

    def tensor(self, device: torch.device) -> Tensor:
        """The integers as ``uint8[16]``."""
        return _on(device, self.table)


@lru_cache
def _on(device: torch.device, table: tuple[int, ...]) -> Tensor:
    return torch.tensor(table, dtype=torch.uint8, device=device)


@lru_cache
def _optimal(grain: int, reach: float) -> tuple[int, ...]:
    """The shortest path of seven steps, a gap in the middle, and the path mirrored."""
    normal, at = NormalDist(), [reach * (2 * i / grain - 1) for i in range(grain + 1)]
    below, density = [normal.cdf(x) for x in at], [normal.pdf(x) for x in at]

    def variance(i: int, j: int) -> float:
        """Integral of ``(x - a) (b - x)`` under the density."""
        a, b = at[i], at[j]
        mass, first = below[j] - below[i], density[i] - density[j]
        return (a + b) * first - a * b * mass - (mass + a * density[i] - b * density[j])

    half: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for _ in range(CODES // 2 - 1):
        half = {
            j: min((cost + variance(i, j), (*path, j)) for i, (cost, path) in half.items() if i < j)
            for j in range(min(half) + 1, (grain + 1) // 2)
        }
    _, path = min((2 * cost + variance(i, grain - i), path) for i, (cost, path) in half.items())
    return (*path, *(grain - i for i in reversed(path)))


@dataclass(frozen=True, eq=False)
class Rotation:
    """A block cut into pieces that are rotated each by itself.

    Attributes:
        block: What is rotated.
        pieces: ``int64[P, 6]``: start in the flat buffer, number of values, power of two to rotate (values past the
            last count as zero), position, index of the first value within its parameter, and run.
    """

    block: Block
    pieces: Int64Array

    @classmethod
    def of(cls, block: Block, size: int) -> Rotation:
        """Pieces of ``size`` values, and smaller powers of two for the rest of a run, which fill its positions."""
        pieces = []
        for run, (start, length, position) in enumerate(block.runs.tolist()):
            first = 0
            while first < length:
                left = -(-(length - first) // ALIGNMENT) * ALIGNMENT
                power = min(size, 1 << (left.bit_length() - 1))
                values = min(power, length - first)
                pieces.append((start + first, values, power, position + first, int(block.origins[run]) + first, run))
                first += power
        return cls(block, np.array(pieces, dtype=np.int64).reshape(-1, 6))

    @property
    def payload_bytes(self) -> int:
        """Size of the codes."""
        return self.block.positions // 2

    def scales(self, values: Tensor) -> Tensor:
        """Root mean square of each piece."""
        scales = torch.empty(len(self.pieces), dtype=torch.float32, device=values.device)
        kernels.rotated_scales(self.pieces, values, scales)
        return scales

    def encode(
        self,
        values: Tensor,
        residual: Tensor | None,
        scales: Tensor,
        levels: Levels,
        shared: int,
        own: int,
        payload: Tensor,
    ) -> None:
        """Rotates with the shared key, rounds with one's own, and takes what is sent from the residual."""
        kernels.rotated_encode(
            self.pieces,
            values,
            residual,
            scales,
            levels.tensor(values.device),
            levels.reach,
            run_keys(shared, self.block.streams),
            run_keys(own, self.block.streams),
            payload,
        )

    def decode(self, sums: Tensor, count: int, scales: Tensor, levels: Levels, shared: int, out: Tensor) -> None:
        """Writes the mean of ``count`` workers from the sums of their integers."""
        kernels.rotated_decode(
            self.pieces,
            sums,
            count,
            scales,
            levels.tensor(out.device),
            levels.reach,
            run_keys(shared, self.block.streams),
            out,
        )
