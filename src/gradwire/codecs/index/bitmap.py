"""Coordinates as one bit for each there is."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradwire import kernels
from gradwire.codecs.index.coding import IndexCoding


@dataclass(frozen=True)
class Bitmap(IndexCoding):
    """One bit a position, sent or not: the shortest where a third of them or more are sent."""

    def size(self, count: int, universe: int) -> int:
        """Whole words, whatever the count."""
        return -(-universe // 32) * 4

    def encode(self, positions: Tensor, universe: int, payload: Tensor) -> int:
        """Sets the bits."""
        kernels.bitmap_encode(positions, universe, payload)
        return positions.numel()

    def decode(self, payload: Tensor, universe: int, positions: Tensor) -> int:
        """Lists them."""
        kernels.bitmap_decode(payload, universe, positions)
        return positions.numel()
