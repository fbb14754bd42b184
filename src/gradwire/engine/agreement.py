"""Before anything is attached: do all ranks mean the same?"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from gradwire.codecs.codec import FORMAT_VERSION
from gradwire.engine.mixture import Configured
from gradwire.errors import ConfigurationError
from gradwire.wire import Transport


def check_agreement(
    configuration: Configured,
    parameters: Sequence[tuple[str, torch.nn.Parameter]],
    transport: Transport,
    device: torch.device,
    further: Mapping[str, str],
) -> None:
    """Compares configuration, further choices and parameters over all ranks; every rank must call it.

    Raises:
        ConfigurationError: On every rank, naming the first difference, if two ranks differ.
    """
    lines = [f"payload formats, version {FORMAT_VERSION}"]
    lines += [f"{key}={value}" for key, value in {**configuration.describe(), **further}.items()]
    lines += [
        f"parameter {name} with shape {tuple(parameter.shape)} and dtype {parameter.dtype}"
        for name, parameter in parameters
    ]
    check_same(lines, transport, device)


def check_same_step(step: int, do: str, transport: Transport, device: torch.device) -> None:
    """Compares over all ranks what is done after which step; every rank must call it.

    Raises:
        ConfigurationError: On every rank, if two ranks differ.
    """
    check_same([f"{do} after step {step}"], transport, device, f"{do} on all ranks between the same two steps")


def check_same(
    lines: Sequence[str],
    transport: Transport,
    device: torch.device,
    remedy: str = "attach with the same model, method and options on all ranks",
) -> None:
    """Compares lines of text over all ranks; every rank must call it.

    Raises:
        ConfigurationError: On every rank, naming the first difference, if two ranks differ.
    """
    text = "\n".join(lines).encode()
    digest = hashlib.blake2b(text, digest_size=24).digest() + len(text).to_bytes(8, "little")
    rows = transport.all_gather(_tensor(digest, device))().cpu()
    if bool((rows == rows[0]).all()):
        return
    longest = max(int.from_bytes(bytes(row[24:].tolist()), "little") for row in rows)
    texts = transport.all_gather(_tensor(text.ljust(longest, b"\n"), device))().cpu()
    per_rank = [bytes(row.tolist()).decode().rstrip("\n").split("\n") for row in texts]
    for rank, other in enumerate(per_rank):
        for ours, theirs in zip_longest(per_rank[0], other, fillvalue="nothing"):
            if ours != theirs:
                raise ConfigurationError(f"ranks differ: rank 0 has {ours!r}, rank {rank} has {theirs!r}; {remedy}")


def check_equal(
    tensors: Sequence[tuple[str, Tensor]], transport: Transport, device: torch.device, remedy: str
) -> bytes:
    """Compares the bits of tensors over all ranks, in one collective; every rank must call it.

    Args:
        tensors: Names and tensors, of the same names and shapes on all ranks.
        transport: The other ranks.
        device: What it sends from.
        remedy: What else to do than to start all ranks from one model.

    Returns:
        A digest of each tensor, one after the other.

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
            f"{tensors[index][0]!r} has other values on rank {rank} than on rank 0; start all ranks from one model, or "
            f"{remedy}"
        )
    return digests


def _tensor(data: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _bytes(tensor: Tensor) -> bytes:
    values = tensor.detach().cpu().contiguous().reshape(-1)
    return bytes(values.view(torch.uint8).numpy()) if values.numel() else b""
