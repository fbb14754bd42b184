"""Values in a floating-point type, narrower or not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.codecs.codec import Decode, LinearCodec
from gradwire.deferred import copy_where, known
from gradwire.layout import Block
from gradwire.memory import Feedback


@dataclass(frozen=True)
class Cast(LinearCodec):
    """Every value, rounded to ``dtype``; where a memory is kept, one beyond its range counts as not finite.

    Such a value is forgotten, with the rounding error that was remembered there: it would not fit later either.

    Attributes:
        dtype: ``torch.float32``, ``torch.float16`` or ``torch.bfloat16``.
    """

    dtype: torch.dtype

    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, key: int) -> tuple[Tensor, Decode]:
        """Rounds; where nothing has to move or change, the code is the gradient's own storage."""
        lengths = [stop - start for start, stop in block.spans]

        def decode(mean: Tensor, out: Tensor) -> None:
            for part, values in zip(block.parts(out), torch.split(mean, lengths), strict=True):
                if part.data_ptr() != values.data_ptr():
                    part.copy_(values)

        if feedback.residual is None:
            return _joined(block.parts(gradient)).to(self.dtype), decode
        values, finite = feedback.compensate(block, gradient)
        parts = block.parts(values)
        code = _joined(parts).to(self.dtype, copy=True)
        if self.dtype != values.dtype:
            finite = finite & code.isfinite().all()
        if known(finite):
            for part, sent in zip(parts, torch.split(code, lengths), strict=True):
                part.sub_(sent)
            return code, decode
        for part, sent in zip(parts, torch.split(code, lengths), strict=True):
            copy_where(finite, part - sent, part.masked_fill_(sent.isinf(), 0.0))
        return code.masked_fill_(~finite, torch.nan), decode


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
