"""What a quantiser is to the loops that encode and decode: a small value."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from gradwire.layout import Block, aligned

Draws = Callable[[], Tensor]
"""32 random bits for each value of a run, as int64, for codes that want them."""


TRITS = 5
"""The packing of five digits of base 3 a byte."""

NINE = 9
"""The packing of a byte a position, and a ninth bit for each after all of them."""


class Layout(NamedTuple):
    """What a payload consists of.

    Attributes:
        words: float32 numbers for each segment, which stand first; NaN for a segment that is not finite.
        bits: How the integers of all positions are packed, which follow: 1, 2, 4 or 8 bits each, lowest bits first, or
            as :data:`TRITS` or :data:`NINE` have it.
        mark: What each position of a segment that is not finite is written as.
    """

    words: int
    bits: int
    mark: int = 0

    def body(self, positions: int) -> int:
        """Bytes of so many positions, a multiple of 8."""
        return trits_stride(positions) if self.bits == TRITS else positions * self.bits // 8


def trits_stride(positions: int) -> int:
    """How many bytes hold ``positions`` digits of base 3, and how far apart the digits of one byte are."""
    return aligned(-(-positions // TRITS))


class Code(Protocol):
    """How the values of a segment are written: a ``NamedTuple`` of numbers, its parameters, with its mathematics.

    The methods are the specification, in plain torch; ``kernels.encode`` and ``kernels.decode`` loop over segments and
    runs. A device that is to have it fast registers compiled functions for its class.
    """

    def check(self) -> None:
        """Raises ConfigurationError if a parameter is out of range."""
        ...

    @property
    def layout(self) -> Layout:
        """How a payload is written."""
        ...

    def measure(self, values: list[Tensor]) -> Tensor | None:
        """``float32[words]`` that a segment of these runs is written against; None if a value is not finite."""
        ...

    def put(self, t: Tensor, scale: Tensor, draws: Draws) -> Tensor:
        """An integer for each value."""
        ...

    def read(self, codes: Tensor, scales: Tensor) -> Tensor:
        """What integers stand for, ``int32[n]``, any that can be packed; ``scales`` is ``float32[n or 1, words]``."""
        ...


def payload_bytes(code: Code, block: Block) -> int:
    """Size of a payload: words, body, and zeros up to a multiple of 4 bytes."""
    layout = code.layout
    return -(-(4 * layout.words * block.segment_count + layout.body(block.positions)) // 4) * 4
