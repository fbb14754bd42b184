"""Codes of randomly rotated values."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from gradwire.layout import Int64Array, UInt64Array


class Rotation(Protocol):
    """Codes of randomly rotated values."""

    def rotated_scales(self, pieces: Int64Array, values: Tensor, scales: Tensor) -> None:
        """Root mean square of each piece of a :class:`gradwire.transform.Rotation`, zeros past its values included."""
        ...

    def rotated_encode(
        self,
        pieces: Int64Array,
        values: Tensor,
        residual: Tensor | None,
        scales: Tensor,
        levels: Tensor,
        reach: float,
        shared: UInt64Array,
        own: UInt64Array,
        payload: Tensor,
    ) -> None:
        """4-bit codes of the levels to which each rotated piece's coordinates are rounded.

        Args:
            pieces: As of a rotation.
            values: ``float32`` flat buffer.
            residual: Holds the values; what is sent is subtracted.
            scales: Of each piece; where not finite or 0, codes are 0 and nothing is subtracted.
            levels: ``uint8[16]``, ascending from 0.
            reach: What the last level stands for; the first stands for its negative.
            shared: Each run's key for the signs of the rotation.
            own: Each run's key for rounding.
            payload: ``uint8``, two codes a byte, lower half first.
        """
        ...

    def rotated_sums(self, payloads: Tensor, levels: Tensor, sums: Tensor) -> None:
        """Adds up the integers of all rows' codes, to one byte each or two, little-endian, as ``sums`` has room for."""
        ...

    def rotated_decode(
        self,
        pieces: Int64Array,
        sums: Tensor,
        count: int,
        scales: Tensor,
        levels: Tensor,
        reach: float,
        shared: UInt64Array,
        out: Tensor,
    ) -> None:
        """Rotates back the mean of ``count`` workers; a piece whose scale is not finite becomes NaN."""
        ...
