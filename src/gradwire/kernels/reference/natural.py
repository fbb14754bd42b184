"""Powers of two, drawn so that the mean is right."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.errors import ConfigurationError
from gradwire.kernels.code import NINE, Draws, Layout
from gradwire.kernels.reference._torch import largest

FRACTION_BITS = 23
"""Bits of a float32 below its exponent."""

LARGEST_EXPONENT = 254
"""The largest exponent field of a finite float32."""

NOT_FINITE = 255
"""The exponent field that marks a value of a segment that could not be sent."""

DISTANCES = 127
"""Exponents that 7 bits tell apart, beside zero."""


class Natural(NamedTuple):
    """Every value as one of the two powers of two around it, as natural compression has it.

    The larger power is taken with the probability that makes the value right on average; the squared error is at most
    1/8 of the squared value. Magnitudes above ``2**127`` count as ``2**127``. Denormal values become 0 or ``2**-126``,
    without bias.

    Attributes:
        bits: 9 for a sign and all exponents of float32; 8 for a sign and the 127 exponents below the largest of a
            segment. Smaller values become 0 or the smallest of these powers, without bias to within ``2**-24`` of it.
    """

    bits: int = 8

    def check(self) -> None:
        """Has exponents of 7 or 8 bits."""
        if self.bits not in (8, 9):
            raise ConfigurationError(f"bits={self.bits!r} is not possible; choose 9, or 8 for exponents of 7 bits")

    @property
    def layout(self) -> Layout:
        """``bits`` a position, and 4 bytes a segment with 8 bits."""
        return Layout(1, 8) if self.bits == 8 else Layout(0, NINE, NOT_FINITE)

    def measure(self, values: list[Tensor]) -> Tensor | None:
        """The unit, a power of two: so many exponents does a segment go without, to need 127 at most."""
        peak = largest(values)
        if math.isnan(peak):
            return None
        field = math.frexp(peak)[1] + 126 if peak else 0
        shift = max(0, min(field + 1, LARGEST_EXPONENT) - DISTANCES)
        return values[0].new_tensor([2.0**shift] if self.bits == 8 else [])

    def put(self, t: Tensor, scale: Tensor, draws: Draws) -> Tensor:
        """The exponent field, after random bits were added to the fraction, and above it the sign."""
        unit = scale if self.bits == 8 else scale.new_ones(1)
        shift = math.frexp(float(unit))[1] - 1
        scaled = t.abs() * unit.new_tensor(2.0**-shift)
        field = (scaled.view(torch.int32) + (draws() >> 32 - FRACTION_BITS).int()) >> FRACTION_BITS
        return field.clamp(max=LARGEST_EXPONENT - shift) | (t < 0).int() << (self.bits - 1)

    def read(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Signed powers."""
        place = self.bits - 1
        field = codes & ((1 << place) - 1)
        magnitudes = (field << FRACTION_BITS).view(torch.float32).masked_fill(field == NOT_FINITE, torch.nan)
        magnitudes = magnitudes * scales[:, 0] if self.bits == 8 else magnitudes
        return torch.where(codes >> place == 1, -magnitudes, magnitudes)
