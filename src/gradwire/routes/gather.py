"""Every payload to every worker."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.codec import Codec
from gradwire.layout import Block
from gradwire.memory import Feedback
from gradwire.wire.requests import AllGather, Synchronization


def gather(
    codec: Codec, block: Block, gradient: Tensor, feedback: Feedback, key: int, world_size: int
) -> Synchronization:
    """Decodes all payloads everywhere: b (n - 1) bytes for a payload of b bytes.

    Args:
        codec: What writes the payload.
        block: Which elements of ``gradient``.
        gradient: ``float32`` flat buffer; left with the average.
        feedback: This worker's memory.
        key: Randomness of this rank in this step.
        world_size: n.
    """
    payload = torch.empty(codec.payload_bytes(block), dtype=torch.uint8, device=gradient.device)
    codec.encode(block, gradient, feedback, payload, key)
    payloads = yield AllGather(payload)
    codec.decode(block, payloads, gradient, 1 / world_size)
