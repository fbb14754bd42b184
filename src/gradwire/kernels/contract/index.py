"""Positions in few bits."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Index(Protocol):
    """Positions in few bits."""

    def gaps_encode(self, positions: Tensor, universe: int, classes: Tensor, low: Tensor) -> int:
        """A class ``uint8[n]`` for each gap, and low bits in ``uint8[gaps_low_bytes]``: returns how many bytes."""
        ...

    def gaps_decode(self, classes: Tensor, low: Tensor, universe: int, positions: Tensor) -> None:
        """Reads positions back; raises PayloadError unless they are distinct and below ``universe``."""
        ...

    def bitmap_encode(self, positions: Tensor, universe: int, payload: Tensor) -> None:
        """Bit ``p % 8`` of byte ``p // 8`` is set where position ``p``, below ``universe``, is there."""
        ...

    def bitmap_decode(self, payload: Tensor, universe: int, positions: Tensor) -> None:
        """Reads ``positions.numel()`` positions; PayloadError unless there are so many, all below ``universe``."""
        ...

    def elias_fano_bytes(self, count: int, universe: int) -> int:
        """Size of ``count`` ascending distinct positions below ``universe``."""
        ...

    def elias_fano_encode(self, positions: Tensor, universe: int, payload: Tensor) -> None:
        """Writes ascending distinct positions in at most ``2 + log2(universe / count)`` bits each."""
        ...

    def elias_fano_decode(self, payload: Tensor, universe: int, positions: Tensor) -> None:
        """Reads ``positions.numel()`` positions; PayloadError unless ascending, distinct and below ``universe``."""
        ...
