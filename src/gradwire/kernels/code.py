"""What a quantiser is to the loops that encode and decode: a small value."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from gradwire.layout import Block

Draws = Callable[[], Tensor]
"""32 random bits for each value of a run, as int64, for codes that want them."""


class Layout(NamedTuple):
    """What a payload consists of.

    Attributes:
        words: float32 numbers for each segment, which stand first; NaN for a segment that is not finite.
        body: Bytes for all positions, which follow.
        mark: What each position of a segment that is not finite is written as.
    """

    words: int
    body: int
    mark: int = 0


class Code(Protocol):
    """How the values of a segment are written: a ``NamedTuple`` of numbers, its parameters, with its mathematics.

    The methods are the specification, in plain torch; ``kernels.encode`` and ``kernels.decode`` loop over segments and
    runs. A device that is to have it fast registers compiled functions for its class.
    """

    def check(self) -> None:
        """Raises ConfigurationError if a parameter is out of range."""
        ...

    def layout(self, positions: int) -> Layout:
        """Sizes of a payload of so many positions, a multiple of 8."""
        ...

    def measure(self, values: list[Tensor]) -> Tensor | None:
        """``float32[words]`` that a segment of these runs is written against; None if a value is not finite."""
        ...

    def put(self, t: Tensor, scale: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """An integer for each value, and what it stands for."""
        ...

    def pack(self, codes: Tensor) -> Tensor:
        """``uint8[body]`` from the integers of all positions, ``int32[positions]``, 0 in gaps."""
        ...

    def read(self, body: Tensor, scales: Tensor) -> Tensor:
        """What all positions stand for; ``scales`` is ``float32[positions, words]``."""
        ...


def payload_bytes(code: Code, block: Block) -> int:
    """Size of a payload: words, body, and zeros up to a multiple of 4 bytes."""
    words, body, _ = code.layout(block.positions)
    return -(-(4 * words * block.segment_count + body) // 4) * 4
