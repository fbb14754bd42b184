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

    def centroids_encode(
        self,
        pieces: Int64Array,
        gradient: Tensor,
        residual: Tensor | None,
        beta: float,
        gamma: float,
        centroids: Tensor,
        keys: UInt64Array,
        scales: Tensor,
        codes: Tensor,
    ) -> None:
        """The nearest centroid of each coordinate of each rotated piece over its root mean square, and a scale a piece.

        Args:
            pieces: As of a rotation.
            gradient: ``float32`` flat buffer.
            residual: Left with what is not sent.
            beta: Weight of the residual.
            gamma: Weight of the gradient.
            centroids: ``float32[2**bits]``, ascending, without 0, for 1, 2 or 4 bits.
            keys: Each run's key for the signs of the rotation.
            scales: ``float32[pieces]``, to be filled; NaN for a piece that is not finite, whose codes are 0.
            codes: ``uint8``, to be filled, lowest bits first.
        """
        ...

    def centroids_decode(
        self,
        pieces: Int64Array,
        scales: Tensor,
        codes: Tensor,
        centroids: Tensor,
        keys: UInt64Array,
        out: Tensor,
        add: bool,
        weight: float,
    ) -> None:
        """``out = weight * decoded``, or with ``add`` ``weight * (out + decoded)``; NaN where a scale is not finite."""
        ...
