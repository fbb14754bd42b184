"""What every way of writing coordinates has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from gradwire.errors import ConfigurationError


class IndexCoding(ABC):
    """Writes ascending distinct positions in a size that depends on their number and range alone."""

    @abstractmethod
    def size(self, count: int, universe: int) -> int:
        """Bytes for ``count`` positions below ``universe``, a multiple of 4."""

    def bound(self, count: int, universe: int) -> int:
        """Bytes that are enough for up to ``count`` positions below ``universe``, a multiple of 4."""
        return self.size(count, universe)

    @abstractmethod
    def encode(self, positions: Tensor, universe: int, payload: Tensor) -> None:
        """Writes ``int64[count]`` ascending distinct positions to ``uint8[size(count, universe)]``."""

    @abstractmethod
    def decode(self, payload: Tensor, universe: int, positions: Tensor) -> None:
        """Reads ``int64[count]`` positions.

        Raises:
            PayloadError: Unless they are ascending, distinct and below ``universe``.
        """


def parse(coding: str | IndexCoding) -> IndexCoding:
    """Reads ``raw``, ``bitmap`` or ``elias-fano``.

    Raises:
        ConfigurationError: If ``coding`` is neither these nor an index coding.
    """
    from gradwire.index.bitmap import Bitmap
    from gradwire.index.elias_fano import EliasFano
    from gradwire.index.raw import Raw

    match coding:
        case IndexCoding():
            return coding
        case "raw":
            return Raw()
        case "bitmap":
            return Bitmap()
        case "elias-fano":
            return EliasFano()
    raise ConfigurationError(f"index coding {coding!r} is not known; choose 'raw', 'bitmap' or 'elias-fano'")
