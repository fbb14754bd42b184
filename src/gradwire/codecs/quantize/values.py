"""How the chosen values of a sparse payload are written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.codec import Codec
from gradwire.codecs.quantize.names import codecs
from gradwire.layout import ALIGNMENT, Block
from gradwire.memory import NONE, Remainder
from gradwire.plain import Plain
from gradwire.registry import Registry


class ValueCoding(Plain, ABC):
    """Writes the values that a selector chose, in order of position.

    What was chosen is itself a block, ``chosen``: a dense buffer with one segment for each segment chosen from.
    """

    def remainder(self, most: int) -> Remainder:
        """What error feedback makes of what it loses of segments of up to ``most`` values."""
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
        """Writes ``float32[chosen.numel]``; non-finite values decode to non-finite values.

        Values are not to be changed: what is left of them once they are written is the residual.
        """

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

    def remainder(self, most: int) -> Remainder:
        """The codec's."""
        return self.codec.remainder(most)

    def size(self, chosen: Block) -> int:
        """The codec's payload."""
        return self.codec.payload_bytes(chosen)

    def encode(self, chosen: Block, values: Tensor, payload: Tensor, key: int) -> None:
        """Encodes segment by segment."""
        self.codec.encode(chosen, values, NONE, payload, key)

    def decode(self, chosen: Block, payload: Tensor, values: Tensor) -> None:
        """Decodes the one payload."""
        self.codec.decode(chosen, payload[None], values, 1.0)


@dataclass(frozen=True)
class MeanValues(ValueCoding):
    """All chosen values of a segment as their mean, a float32; without a name, since values of both signs cancel."""

    def size(self, chosen: Block) -> int:
        """Four bytes a segment."""
        return 4 * chosen.segment_count

    def encode(self, chosen: Block, values: Tensor, payload: Tensor, key: int) -> None:
        """NaN where a value is not finite."""
        sides = (values.clamp(min=0), values.clamp(max=0))
        above, below = (kernels.magnitude_statistics(chosen, kernels.Compensated(side))[0] for side in sides)
        payload.view(torch.float32).copy_(torch.from_numpy((above - below) / chosen.segment_numels))

    def decode(self, chosen: Block, payload: Tensor, values: Tensor) -> None:
        """The mean, over and over."""
        lengths = torch.from_numpy(chosen.segment_numels).to(values.device)
        values.copy_(payload.view(torch.float32).repeat_interleave(lengths, output_size=chosen.numel))


codings: Registry[Callable[..., ValueCoding | Codec]] = Registry("value coding", ", or an object", codecs)
register, names = codings.register, codings.names

register("fp32")(lambda: FloatValues(torch.float32))
register("fp16")(lambda: FloatValues(torch.float16))
register("bf16")(lambda: FloatValues(torch.bfloat16))


def parse(coding: str | ValueCoding | Codec) -> ValueCoding:
    """A value coding by its name, such as ``"fp16"``, one that a codec makes, such as ``"qsgd:4"``, or itself.

    Raises:
        ConfigurationError: If ``coding`` is neither a name of :func:`names` nor a value coding nor a codec.
    """
    found = coding if isinstance(coding, ValueCoding | Codec) else codings.make(coding)
    return CodedValues(found) if isinstance(found, Codec) else found
