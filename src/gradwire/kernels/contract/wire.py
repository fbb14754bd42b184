"""What goes along with payloads."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Wire(Protocol):
    """What goes along with payloads."""

    def checksums(self, words: Tensor, sums: Tensor) -> None:
        """Sums up the words of each row, taken as unsigned and weighted by 1, 3, 5, …, modulo ``2**64``.

        Weights are modulo ``2**32``.

        Args:
            words: ``int32[n, m]``, contiguous.
            sums: ``int64[n]``, to be filled.
        """
        ...
