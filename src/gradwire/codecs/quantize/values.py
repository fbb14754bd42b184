"""How the chosen values of a sparse payload are written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradwire.codecs.codec import Codec
from gradwire.codecs.quantize import names
from gradwire.errors import ConfigurationError
from gradwire.layout import ALIGNMENT, Block
from gradwire.memory import NONE, Remainder


class ValueCoding(ABC):
    """Writes the values that a selector chose, in order of position.

    What was chosen is itself a block, ``chosen``: a dense buffer with one segment for each segment chosen from.
    """

    @property
    def remainder(self) -> Remainder:
        """What error feedback makes of what it loses."""
        return "shrinks"

    @abstractmethod
    def size(self, chosen: Block) -> int:
        """Bytes for the chosen values, a multiple of 4."""

    def bound(self, count: int, segments: int) -> int:
        """Bytes that are enough for up to ``count`` values in up to ``segments`` segments, a multiple of 4.

        What a segment takes grows either with its first value and then with every so many more, and then most is taken
        by one value in each segment but the last; or with its first so many values, and then by equal segments.
        """
        segments = min(segments, count)
        uneven = np.ones(segments, dtype=np.int64)
        uneven[-1:] += count - segments
        even = np.full(segments, -(-count // max(segments, 1)) + ALIGNMENT)
        return max(self.size(Block.dense("bound", lengths)) for lengths in (uneven, even))

    @abstractmethod
    def encode(self, chosen: Block, values: Tensor, payload: Tensor, key: int) -> None:
        """Writes ``float32[chosen.numel]``; non-finite values decode to non-finite values."""

    @abstractmethod
    def decode(self, chosen: Block, payload: Tensor, values: Tensor) -> None:
        """Reads them back, rounded as they were written."""


@dataclass(frozen=True)
class FloatValues(ValueCoding):
    """Every value as a float.

    Attributes:
        dtype: ``torch.float32``, ``torch.float16`` or ``torch.bfloat16``.
    """

    dtype: torch.dtype = torch.float32

    def size(self, chosen: Block) -> int:
        """Two or four bytes each, rounded up to 4."""
        return self.bound(chosen.numel, 1)

    def bound(self, count: int, segments: int) -> int:
        """Segments make no difference."""
        return -(-count * self.dtype.itemsize // 4) * 4

    def encode(self, chosen: Block, values: Tensor, payload: Tensor, key: int) -> None:
        """Rounds to ``dtype``, and fills up with zeros."""
        written = payload.view(self.dtype)
        written[: len(values)].copy_(values)
        written[len(values) :].zero_()

    def decode(self, chosen: Block, payload: Tensor, values: Tensor) -> None:
        """Widens to float32."""
        values.copy_(payload.view(self.dtype)[: len(values)])


@dataclass(frozen=True)
class CodedValues(ValueCoding):
    """The chosen values written by a codec of their own, such as signs or stochastic levels.

    Attributes:
        codec: What writes them; it needs no memory, because what it loses stays where the values were chosen.
    """

    codec: Codec

    @property
    def remainder(self) -> Remainder:
        """The codec's."""
        return self.codec.remainder

    def size(self, chosen: Block) -> int:
        """The codec's payload."""
        return self.codec.payload_bytes(chosen)

    def encode(self, chosen: Block, values: Tensor, payload: Tensor, key: int) -> None:
        """Encodes segment by segment."""
        self.codec.encode(chosen, values, NONE, payload, key)

    def decode(self, chosen: Block, payload: Tensor, values: Tensor) -> None:
        """Decodes the one payload."""
        self.codec.decode(chosen, payload[None], values, 1.0)


def parse(coding: str | ValueCoding) -> ValueCoding:
    """Reads ``fp32``, ``fp16``, ``bf16``, or what :func:`gradwire.codecs.quantize.parse` reads.

    Raises:
        ConfigurationError: If ``coding`` is neither these nor a value coding.
    """
    match coding:
        case ValueCoding():
            return coding
        case "fp32":
            return FloatValues(torch.float32)
        case "fp16":
            return FloatValues(torch.float16)
        case "bf16":
            return FloatValues(torch.bfloat16)
    found = names.find(coding) if isinstance(coding, str) else None
    if found is None:
        raise ConfigurationError(
            f"value coding {coding!r} is not known; choose 'fp32', 'fp16', 'bf16', or one of {names.KNOWN}"
        )
    return CodedValues(found)
