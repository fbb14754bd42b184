"""Coordinates as one bit for each there is."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.errors import PayloadError
from gradwire.kernels.reference._torch import pack, unpack


def bitmap_encode(positions: Tensor, universe: int, payload: Tensor) -> None:
    """Bit ``p % 8`` of byte ``p // 8`` is set where position ``p``, below ``universe``, is there."""
    bits = torch.zeros(8 * payload.numel(), dtype=torch.uint8, device=positions.device)
    bits[positions] = 1
    payload.copy_(pack(bits, 1))


def bitmap_decode(payload: Tensor, universe: int, positions: Tensor) -> None:
    """Reads ``positions.numel()`` positions; PayloadError unless there are so many, all below ``universe``."""
    found = unpack(payload, 1).nonzero().flatten()
    if found.numel() != positions.numel() or bool((found >= universe).any()):
        raise no_such_bitmap(positions.numel(), universe)
    positions.copy_(found)


def no_such_bitmap(count: int, universe: int) -> PayloadError:
    """What to raise for bits that no encoder writes."""
    return PayloadError(f"the bitmap does not have {count} bits set, all of them below {universe}")
