"""Distances between ascending positions, each as a class that is worth coding and low bits that are not."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.errors import PayloadError
from gradwire.kernels.reference._torch import pack, unpack

LARGEST_CLASS = 125
"""Of gaps of 63 bits."""


def gaps_low_bytes(count: int, universe: int) -> int:
    """Bytes that are enough for the low bits of ``count`` gaps below ``universe``, a multiple of 4."""
    return 4 * -(-count * max(universe.bit_length() - 2, 0) // 32)


def gaps_encode(positions: Tensor, universe: int, classes: Tensor, low: Tensor) -> int:
    """A class ``uint8[n]`` for each gap, and low bits in ``uint8[gaps_low_bytes]``: returns how many bytes.

    Raises:
        PayloadError: If positions are not ascending, distinct and below ``universe``.
    """
    gaps = positions.diff(prepend=positions.new_tensor([-1])).tolist()
    if any(gap <= 0 for gap in gaps) or sum(gaps) > universe:
        raise PayloadError(f"positions to encode must be ascending, distinct and in [0, {universe})")
    bits: list[int] = []
    for number, gap in enumerate(gaps):
        width = _low_width(gap.bit_length() - 1)
        classes[number] = 2 * (gap.bit_length() - 1) + (gap >> width & 1)
        bits += [gap >> bit & 1 for bit in range(width)]
    bits += [0] * (-len(bits) % 32)
    packed = pack(torch.tensor(bits, dtype=torch.uint8, device=low.device), 1)
    low[: packed.numel()] = packed
    return packed.numel()


def gaps_decode(classes: Tensor, low: Tensor, universe: int, positions: Tensor) -> None:
    """Reads positions back; raises PayloadError unless they are distinct and below ``universe``."""
    kinds = classes.tolist()
    widths = [_low_width(kind // 2) for kind in kinds]
    if any(not 1 <= kind <= LARGEST_CLASS for kind in kinds) or sum(widths) > 8 * low.numel():
        raise not_gaps(len(kinds), universe)
    bits = unpack(low, 1).tolist()
    position, read = -1, 0
    for number, (kind, width) in enumerate(zip(kinds, widths, strict=True)):
        high = 2 + kind % 2 if kind > 1 else 1
        position += (high << width) + sum(bit << place for place, bit in enumerate(bits[read : read + width]))
        read += width
        if position >= universe:
            raise not_gaps(len(kinds), universe)
        positions[number] = position


def not_gaps(count: int, universe: int) -> PayloadError:
    """What is raised of bytes that no encoder wrote."""
    return PayloadError(f"the gaps are not those of {count} ascending, distinct positions below {universe}")


def _low_width(exponent: int) -> int:
    """How many bits of a gap of ``2**exponent`` and more its class says nothing of."""
    return max(exponent - 1, 0)
