"""Coordinates in a size known beforehand."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.errors import PayloadError
from gradwire.kernels.reference._torch import pack, unpack


def elias_fano_bytes(count: int, universe: int) -> int:
    """Size of ``count`` ascending distinct positions below ``universe``."""
    if not count:
        return 0
    width = _elias_fano_low_width(count, universe)
    return 4 * (-(-count * width // 32) + -(-(count + (universe - 1 >> width)) // 32))


def elias_fano_layout(count: int, universe: int, size: int) -> tuple[int, int]:
    """How many low bits of each position are stored as they are, and in how many bytes all of them.

    Raises:
        PayloadError: If ``size`` is not the number of bytes that ``count`` positions take.
    """
    if size != elias_fano_bytes(count, universe):
        raise PayloadError(
            f"{count} positions below {universe} take {elias_fano_bytes(count, universe)} bytes, not {size}"
        )
    width = _elias_fano_low_width(count, universe)
    return width, 4 * -(-count * width // 32)


def _elias_fano_low_width(count: int, universe: int) -> int:
    return min(32, max(0, (universe // count).bit_length() - 1))


def elias_fano_encode(positions: Tensor, universe: int, payload: Tensor) -> None:
    """Writes ascending distinct positions in at most ``2 + log2(universe / count)`` bits each.

    Raises:
        PayloadError: If positions are not ascending, distinct and below ``universe``.
    """
    count = positions.numel()
    if not count:
        return
    if int(positions[0]) < 0 or int(positions[-1]) >= universe or bool((positions.diff() <= 0).any()):
        raise PayloadError(f"positions to encode must be ascending, distinct and in [0, {universe})")
    width, boundary = elias_fano_layout(count, universe, payload.numel())
    shifts = torch.arange(width, device=positions.device)
    low = torch.zeros(8 * boundary, dtype=torch.uint8, device=positions.device)
    low[: count * width] = ((positions[:, None] >> shifts) & 1).flatten().to(torch.uint8)
    high = torch.zeros(8 * (payload.numel() - boundary), dtype=torch.uint8, device=positions.device)
    high[(positions >> width) + torch.arange(count, device=positions.device)] = 1
    payload.copy_(torch.cat((pack(low, 1), pack(high, 1))))


def elias_fano_decode(payload: Tensor, universe: int, positions: Tensor) -> None:
    """Reads ``positions.numel()`` positions; PayloadError unless ascending, distinct and below ``universe``."""
    count = positions.numel()
    if not count:
        return
    width, boundary = elias_fano_layout(count, universe, payload.numel())
    high = unpack(payload[boundary:], 1).nonzero().flatten()
    if high.numel() != count:
        raise PayloadError(f"Elias-Fano bytes hold {high.numel()} positions, not {count}")
    numbers = torch.arange(count, device=payload.device)
    low = unpack(payload[:boundary], 1)[: count * width].view(count, width).to(torch.int64)
    decoded = (high - numbers << width) + (low << torch.arange(width, device=payload.device)).sum(1)
    if int(decoded[-1]) >= universe or bool((decoded.diff() <= 0).any()):
        raise PayloadError(f"Elias-Fano positions are not ascending, distinct and below {universe}")
    positions.copy_(decoded)
