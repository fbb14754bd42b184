"""Coordinates near their entropy, in a size known beforehand."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradwire import kernels
from gradwire.codecs.index.coding import IndexCoding
from gradwire.kernels.reference import elias_fano_bytes


@dataclass(frozen=True)
class EliasFano(IndexCoding):
    """At most ``2 + log2(universe / count)`` bits a coordinate (Elias 1974; Fano 1971).

    The low bits are packed as they are; the high bits are gaps in unary. Unlike entropy-coded gaps, the size does not
    depend on the positions, so every rank knows it without asking.
    """

    def size(self, count: int, universe: int) -> int:
        """Low bits, high bits, rounded up to 4 bytes."""
        return elias_fano_bytes(count, universe)

    def bound(self, count: int, universe: int) -> int:
        """One word more than for ``count``.

        The bits, ``n (l + 1) + (universe - 1 >> l)``, never shrink as ``n`` grows: where ``l`` becomes one less, ``n``
        is ``universe >> l``, which is both what the low bits save and what the high bits take more. Rounding low and
        high bits up to words can differ by one.
        """
        return self.size(count, universe) + 4

    def encode(self, positions: Tensor, universe: int, payload: Tensor) -> int:
        """Splits every position in high and low bits."""
        kernels.elias_fano_encode(positions, universe, payload)
        return positions.numel()

    def decode(self, payload: Tensor, universe: int, positions: Tensor) -> int:
        """Joins high and low bits."""
        kernels.elias_fano_decode(payload, universe, positions)
        return positions.numel()
