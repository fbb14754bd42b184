"""Before the first local step: do all ranks have the same model?"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.errors import ConfigurationError
from gradwire.wire import Transport

Tensors = Sequence[tuple[str, Tensor]]


def check_equal(tensors: Tensors, transport: Transport, device: torch.device) -> None:
    """Compares the bits of tensors over all ranks, in one collective; every rank must call it.

    Raises:
        ConfigurationError: On every rank, naming the first tensor that differs.
    """
    digests = b"".join(hashlib.blake2b(_bytes(tensor), digest_size=8).digest() for _, tensor in tensors)
    rows = transport.all_gather(torch.frombuffer(bytearray(digests), dtype=torch.uint8).to(device))().cpu()
    rows = rows.view(len(rows), len(tensors), 8)
    differs = (rows != rows[0]).any(2)
    if bool(differs.any()):
        index = int(differs.any(0).int().argmax())
        rank = int(differs[:, index].int().argmax())
        raise ConfigurationError(
            f"{tensors[index][0]!r} has other values on rank {rank} than on rank 0; start all ranks from one model, "
            "choose broadcast=True to give all of them rank 0's, or attach before a rank's own state is loaded"
        )


def send_first(tensors: Tensors, transport: Transport) -> None:
    """Overwrites tensors by those of rank 0; every rank must call it."""
    for _, tensor in tensors:
        values = tensor.detach()
        sent = values.clone(memory_format=torch.contiguous_format)
        values.copy_(transport.broadcast(sent, 0)())


def _bytes(tensor: Tensor) -> bytes:
    values = tensor.detach().cpu().contiguous().reshape(-1)
    return bytes(values.view(torch.uint8).numpy()) if values.numel() else b""
