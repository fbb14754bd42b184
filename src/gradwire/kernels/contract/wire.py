"""What goes along with payloads."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Wire(Protocol):
    """What goes along with payloads."""

    def checksums(self, words: Tensor, count: int, sums: Tensor) -> None:
        """Sums up the first ``count`` words of each row, folded and weighted.

        ``word ^ word >> 32``, the shift filling with zeros, times 1, 3, 5, …, modulo ``2**64``.

        Args:
            words: ``int64[n, m]``, contiguous.
            count: At most ``m``.
            sums: ``int64[n]``, to be filled.
        """
        ...
