"""Before the first local step: all ranks have the same model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.wire import Transport

Tensors = Sequence[tuple[str, Tensor]]

REMEDY = "choose broadcast=True to give all of them rank 0's, or attach before a rank's own state is loaded"


def send_first(tensors: Tensors, transport: Transport) -> None:
    """Overwrites tensors, of whatever dtype, by those of rank 0; every rank must call it."""
    for _, tensor in tensors:
        values = tensor.detach()
        sent = values.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
        values.copy_(transport.broadcast(sent, 0)().view(values.dtype).view(values.shape))
