"""Evenly spaced levels."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.errors import ConfigurationError
from gradwire.kernels.code import Draws, Layout
from gradwire.kernels.reference._torch import LARGEST_SCALE, SMALLEST_SCALE, largest, segment_total


class QSGD(NamedTuple):
    """Levels between zero and the norm of a segment, rounded as QSGD does it, so that nothing is biased.

    The level of ``x = t / scale * s`` is ``floor(x + u)``, formed as ``floor(x + (s + u)) - s`` in float32, with ``u``
    the middle of one of ``2**16`` equal parts of [0, 1): level ``floor(x) + 1`` has the probability ``x - floor(x)``,
    rounded to 16 bits. To the ``nearest`` level, as block quantisation has it, ``u`` is 1/2: every value is off by half
    a level at most, but biased, which needs error feedback.

    Attributes:
        bits: Bits a value with its sign: 2, 4 or 8.
        euclidean: Whether the norm is that of the paper's theory, and not of its practice, the largest magnitude.
        nearest: Whether no level is drawn.
    """

    bits: int = 4
    euclidean: bool = False
    nearest: bool = False

    def check(self) -> None:
        """Knows how to pack codes of 2, 4 or 8 bits."""
        check_bits(self.bits)

    @property
    def layout(self) -> Layout:
        """``bits`` a position and 4 bytes a segment."""
        return Layout(1, self.bits)

    def measure(self, values: list[Tensor]) -> Tensor | None:
        """The norm, 0 if too small to divide by."""
        return norm_of(values, self.euclidean)

    def put(self, t: Tensor, scale: Tensor, draws: Draws) -> Tensor:
        """A level of either sign, plus s."""
        levels = self.levels
        inverse = torch.full_like(scale, levels) / scale if scale > 0 else torch.zeros_like(scale)
        offset = torch.full_like(t, 0.5) if self.nearest else uniform16(draws())
        return (t * inverse + (offset + levels)).to(torch.int32).clamp(max=2 * levels)

    def read(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Scaled levels."""
        step = scales[:, 0].clamp(-LARGEST_SCALE, LARGEST_SCALE) / torch.full_like(scales[:, 0], self.levels)
        return (codes.clamp(max=2 * self.levels) - self.levels).float() * step

    def error_bound(self, count: int) -> float:
        """The most that ``E |Q(x) - x|^2 / |x|^2`` can be for ``count`` values of a segment, if levels are drawn.

        A quarter of ``count / s^2``, or ``sqrt(count) / s`` (lemma 3.1 of Alistarh et al. 2017, arXiv:1610.02132).
        """
        return min(count / (4 * self.levels**2), math.sqrt(count) / self.levels)

    @property
    def levels(self) -> int:
        """s, levels on either side of zero."""
        return (1 << (self.bits - 1)) - 1


def norm_of(values: list[Tensor], euclidean: bool = True) -> Tensor | None:
    """A segment's norm, or its largest magnitude, as a scale: 0 if too small to divide by; None if not finite."""
    norm = largest(values)
    if math.isnan(norm):
        return None
    if euclidean:
        norm = math.sqrt(segment_total([t.double().square() for t in values]))
    return values[0].new_tensor([min(norm, LARGEST_SCALE) if norm >= SMALLEST_SCALE else 0.0])


def uniform16(bits: Tensor) -> Tensor:
    """The middle of one of ``2**16`` equal parts of [0, 1)."""
    return (bits >> 16).float() * 2.0**-16 + 2.0**-17


def check_bits(bits: int) -> None:
    """Raises ConfigurationError unless codes of so many bits can be packed."""
    if bits not in (2, 4, 8):
        raise ConfigurationError(f"bits={bits!r} is not possible; choose 2, 4 or 8")
