"""What every way of writing coordinates has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from gradwire.plain import Plain


class IndexCoding(Plain, ABC):
    """Writes ascending distinct positions.

    What they take depends on their number and range alone, unless the coding ``varies``; then a payload may be shorter
    than what is always enough, and has as many positions as fit, from the first one on.
    """

    varies: ClassVar[bool] = False

    @abstractmethod
    def size(self, count: int, universe: int) -> int:
        """Bytes for ``count`` positions below ``universe``, or that are always enough; a multiple of 4."""

    def bound(self, count: int, universe: int) -> int:
        """Bytes that are enough for up to ``count`` positions below ``universe``, a multiple of 4."""
        return self.size(count, universe)

    @abstractmethod
    def encode(self, positions: Tensor, universe: int, payload: Tensor) -> int:
        """Writes ``int64[count]`` ascending distinct positions to ``uint8[size(count, universe)]``.

        Positions are not to be changed, and :meth:`decode` gives the same in the same order: values are written apart.

        Returns:
            How many were written: all of them, unless the coding varies and there was less room.
        """

    @abstractmethod
    def decode(self, payload: Tensor, universe: int, positions: Tensor) -> int:
        """Reads up to ``int64[count]`` positions.

        Returns:
            How many had been written.

        Raises:
            PayloadError: Unless they are ascending, distinct and below ``universe``.
        """

    def wanted(self, payload: Tensor, count: int, universe: int) -> float:
        """How many of the bytes between ``size(0, universe)`` and ``size(count, universe)`` would have held them all.

        Args:
            payload: As written, whether or not all fitted.
            count: How many positions there were.
            universe: What they are below.

        Returns:
            A share of these bytes.
        """
        return 1.0 if count else 0.0
