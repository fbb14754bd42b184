"""Every value in a few bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.codec import Codec
from gradwire.errors import ConfigurationError
from gradwire.kernels import Code, codes
from gradwire.layout import ALIGNMENT, Block
from gradwire.memory import Feedback, Remainder


@dataclass(frozen=True)
class Quantiser(Codec):
    """Writes the values of each segment by a code.

    Attributes:
        code: One of :mod:`gradwire.kernels.codes`, or your own.
        size: Consecutive values of a run that are a segment of their own, a multiple of 8; 0 for segments as they are.
    """

    code: Code
    size: int = 0

    def __post_init__(self) -> None:
        self.code.check()
        if self.size < 0 or self.size % ALIGNMENT:
            raise ConfigurationError(
                f"size={self.size!r} is out of range; choose a multiple of 8, usually 512, or 0 for whole segments"
            )

    def remainder(self, most: int) -> Remainder:
        """Whether error feedback of what the code leaves stays bounded."""
        most = min(most, self.size or most)
        match self.code:
            case codes.TernGrad():  # a value may be off by as much as the largest
                return "stays"
            case codes.QSGD():
                return _of_levels(self.code, most)
            case codes.NUQSGD() | codes.NonUniform():
                return "shrinks" if self.code.error_bound(most) < 1 else "grows"
        return "shrinks"

    def payload_bytes(self, block: Block) -> int:
        """As its code has it."""
        return kernels.payload_bytes(self.code, self._segments(block))

    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, payload: Tensor, key: int) -> None:
        """Writes scales and codes."""
        kernels.encode(self.code, self._segments(block), feedback.source(gradient), payload, key)

    def decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """Sums what codes stand for."""
        self.check(block, payloads)
        kernels.decode(self.code, self._segments(block), payloads, out, weight)

    def encode_each(
        self, blocks: Sequence[Block], gradient: Tensor, feedback: Feedback, payloads: Tensor, key: int
    ) -> None:
        """At once, where the device does."""
        if (at_once := self._at_once("encode_each", gradient.device)) is None:
            return super().encode_each(blocks, gradient, feedback, payloads, key)
        return at_once(self.code, tuple(map(self._segments, blocks)), feedback.source(gradient), payloads, key)

    def decode_each(self, blocks: Sequence[Block], payloads: Tensor, out: Tensor) -> None:
        """At once, where the device does."""
        if (at_once := self._at_once("decode_each", out.device)) is None:
            return super().decode_each(blocks, payloads, out)
        return at_once(self.code, tuple(map(self._segments, blocks)), payloads, out)

    def _at_once(self, name: str, device: torch.device) -> Callable[..., None] | None:
        """None also where a codec that is derived from this one does more than its code."""
        return kernels.for_each(name, self.code, device) if type(self) is Quantiser else None

    def _segments(self, block: Block) -> Block:
        return block.divided(self.size) if self.size else block


def _of_levels(code: codes.QSGD, most: int) -> Remainder:
    """Against the largest magnitude, no value is off by more than a step of ``1 / s`` of it, half that if nearest.

    A step of a segment's L2 norm may be many times its largest value. What is rounded to the nearest such level is
    never off by more than itself, but sent at all only if a value is half a step.
    """
    if not code.euclidean:
        return "shrinks" if code.levels > 1 or code.nearest else "stays"
    if code.nearest:
        return "shrinks" if most <= 4 * code.levels**2 else "stays"
    return "shrinks" if code.error_bound(most) < 1 else "grows"
