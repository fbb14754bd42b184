"""Values in a floating-point type, narrower or not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.codec import LinearCodec
from gradwire.layout import Block
from gradwire.memory import Feedback


@dataclass(frozen=True)
class Cast(LinearCodec):
    """Every value, rounded to ``dtype``.

    Attributes:
        dtype: ``torch.float32``, ``torch.float16`` or ``torch.bfloat16``.
    """

    dtype: torch.dtype

    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, key: int) -> Tensor:
        """Rounds; where nothing has to move or change, the code is the gradient's own storage."""
        if feedback.residual is None:
            return _joined(block.parts(gradient)).to(self.dtype)
        values, finite = feedback.compensate(block, gradient)
        parts = block.parts(values)
        code = _joined(parts).to(self.dtype, copy=True)
        if not finite:
            return code.fill_(torch.nan)
        for part, sent in zip(parts, self._split(block, code), strict=True):
            part.sub_(sent)
        return code

    def decode(self, block: Block, mean: Tensor, out: Tensor, key: int) -> None:
        """Writes the mean where it is not there already."""
        for part, values in zip(block.parts(out), self._split(block, mean), strict=True):
            if part.data_ptr() != values.data_ptr():
                part.copy_(values)

    def _split(self, block: Block, code: Tensor) -> tuple[Tensor, ...]:
        return torch.split(code, [stop - start for start, stop in block.spans])


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
