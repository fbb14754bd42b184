"""Coordinates as 32-bit integers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.codecs.index.coding import IndexCoding
from gradwire.deferred import expect
from gradwire.errors import ConfigurationError, PayloadError


@dataclass(frozen=True)
class Raw(IndexCoding):
    """Four bytes a coordinate, little-endian."""

    def size(self, count: int, universe: int) -> int:
        """Four bytes each."""
        if universe > 2**31:
            raise ConfigurationError(
                f"{universe} positions do not fit 32-bit indices; choose indices='elias-fano' or granularity='layer'"
            )
        return 4 * count

    def encode(self, positions: Tensor, universe: int, payload: Tensor) -> int:
        """Narrows to 32 bits."""
        payload.view(torch.int32).copy_(positions)
        return positions.numel()

    def decode(self, payload: Tensor, universe: int, positions: Tensor) -> int:
        """Widens, and checks what came."""
        positions.copy_(payload.view(torch.int32))
        if len(positions):
            ascending = (positions[1:] > positions[:-1]).all()
            expect(
                ascending & (positions[0] >= 0) & (positions[-1] < universe),
                lambda: PayloadError(f"raw indices are not ascending below {universe}"),
            )
        return positions.numel()
