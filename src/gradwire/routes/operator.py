"""A compression operator at work."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.codecs.codec import Codec
from gradwire.codecs.untouched import as_admitted
from gradwire.layout import Block
from gradwire.memory import Feedback


@dataclass(frozen=True, eq=False)
class Operator:
    """``Q``: a codec, with its memory and the randomness of one step.

    Attributes:
        codec: What writes.
        feedback: What it did not send before.
        key: Randomness of this step.
    """

    codec: Codec
    feedback: Feedback
    key: int

    def encode(self, block: Block, admitted: Tensor) -> Tensor:
        """The payload of what the memory admitted."""
        payload = torch.empty(self.codec.payload_bytes(block), dtype=torch.uint8, device=admitted.device)
        with as_admitted(admitted, self.feedback, self.codec):
            self.codec.encode(block, admitted, self.feedback, payload, self.key)
        return payload
