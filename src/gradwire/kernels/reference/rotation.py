"""Randomised Hadamard rotations, and the levels of a table that add up as integers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradwire.deferred import placed
from gradwire.kernels.reference._torch import SMALLEST_SCALE, pack, segment_total, unpack
from gradwire.layout import Int64Array, UInt64Array
from gradwire.randomness import hash32

LARGEST = torch.finfo(torch.float32).max

PLAIN = 32
"""Values of a transform without random signs."""


def hadamard(starts: Int64Array, values: Tensor, factor: float) -> None:
    """Divides ``PLAIN`` values of a flat buffer from each start by their number, and transforms them, in place.

    Then they are multiplied by a power of two.
    """
    places = placed(starts, values.device)[:, None] + torch.arange(PLAIN, device=values.device)
    values[places] = (_hadamard(values[places].T * (1 / PLAIN)) * factor).T


def rotated_scales(pieces: Int64Array, values: Tensor, scales: Tensor) -> None:
    """Root mean square of each piece of a :class:`gradwire.codecs.transform.Rotation`, zeros past its values included.

    A scale below ``SMALLEST_SCALE`` is 0.
    """
    for number, (start, length, size, *_) in enumerate(pieces.tolist()):
        scale = math.sqrt(segment_total([values[start : start + length].double().square()]) / size)
        scales[number] = scale if scale >= SMALLEST_SCALE else 0.0


def rotated_encode(
    pieces: Int64Array,
    values: Tensor,
    residual: Tensor | None,
    scales: Tensor,
    levels: Tensor,
    reach: float,
    shared: UInt64Array,
    own: UInt64Array,
    payload: Tensor,
) -> None:
    """4-bit codes of the levels to which each rotated piece's coordinates are rounded.

    Args:
        pieces: As of a rotation.
        values: ``float32`` flat buffer.
        residual: Holds the values; what is sent is subtracted.
        scales: Of each piece; where not finite or 0, codes are 0 and nothing is subtracted.
        levels: ``uint8[16]``, ascending from 0.
        reach: What the last level stands for; the first stands for its negative.
        shared: Each run's key for the signs of the rotation.
        own: Each run's key for rounding.
        payload: ``uint8``, two codes a byte, lower half first.

    A coordinate ``y`` of the rotated and scaled piece lies at ``y / reach * g / 2 + g / 2``, clamped to [0, g], between
    two levels; it takes the upper one with the probability that makes it unbiased, rounded to 16 bits.
    """
    table = levels.to(torch.float32)
    grain = int(levels[-1])
    cells = torch.arange(grain, device=values.device)
    lower = torch.searchsorted(levels.to(torch.int64), cells, right=True) - 1
    width = table[lower + 1] - table[lower]
    codes = torch.zeros(2 * payload.numel(), dtype=torch.uint8, device=values.device)
    for (start, length, size, position, counter, run), scale in zip(pieces.tolist(), scales, strict=True):
        if not scale.isfinite() or scale == 0:
            continue
        counters = torch.arange(counter, counter + size, device=values.device)
        signs = _signs(counter, size, int(shared[run]), values.device)
        t = torch.zeros(size, device=values.device, dtype=torch.float32)
        t[:length] = values[start : start + length]
        at = _hadamard(t / scale * signs) * _float(grain / (2 * reach * math.sqrt(size)), t) + grain / 2
        at = at.clamp(0, grain)
        cell = at.to(torch.int64).clamp(max=grain - 1)
        uniform = (hash32(int(own[run]), counters) >> 16).float() * 2.0**-16 + 2.0**-17
        code = lower[cell] + (uniform * width[cell] < at - table[lower[cell]])
        codes[position : position + size] = code.to(torch.uint8)
        if residual is not None:
            sent = _restored(table[code] - grain / 2, scale, signs, reach, grain, 1)[:length]
            left = residual[start : start + length] - sent
            residual[start : start + length] = torch.where(left.isfinite(), left, residual[start : start + length])
    payload.copy_(pack(codes, 4))


def rotated_sums(payloads: Tensor, levels: Tensor, sums: Tensor) -> None:
    """Adds up the integers of all rows' codes, to one byte each or two, little-endian, as ``sums`` has room for."""
    total = torch.stack([levels.to(torch.int32)[unpack(row, 4).long()] for row in payloads]).sum(0)
    if sums.numel() == total.numel():
        sums.copy_(total)
    else:
        sums.copy_(torch.stack((total & 0xFF, total >> 8), dim=1).flatten())


def rotated_decode(
    pieces: Int64Array,
    sums: Tensor,
    count: int,
    scales: Tensor,
    levels: Tensor,
    reach: float,
    shared: UInt64Array,
    out: Tensor,
) -> None:
    """Rotates back the mean of ``count`` workers; a piece whose scale is not finite becomes NaN.

    Overflowing values become the largest finite ones.
    """
    grain = int(levels[-1])
    positions = int(pieces[-1, 2] + pieces[-1, 3]) if len(pieces) else 0
    total = sums.to(torch.int32)
    if sums.numel() > positions:
        total = total[0::2] + (total[1::2] << 8)
    for (start, length, size, position, counter, run), scale in zip(pieces.tolist(), scales, strict=True):
        if not scale.isfinite():
            out[start : start + length] = torch.nan
            continue
        signs = _signs(counter, size, int(shared[run]), out.device)
        coordinates = total[position : position + size].float() - count * grain / 2
        out[start : start + length] = _restored(coordinates, scale, signs, reach, grain, count)[:length]


def _restored(coordinates: Tensor, scale: Tensor, signs: Tensor, reach: float, grain: int, count: int) -> Tensor:
    factor = scale * _float(2 * reach / (grain * math.sqrt(signs.numel()) * count), scale)
    return (_hadamard(coordinates) * factor).clamp(-LARGEST, LARGEST) * signs


def _hadamard(values: Tensor) -> Tensor:
    """The Walsh-Hadamard transform of a power of two of values, or of columns, times the root of their number.

    Every stage adds and subtracts the halves and interleaves the two results.
    """
    for _ in range(len(values).bit_length() - 1):
        low, high = values.chunk(2)
        values = torch.stack((low + high, low - high), dim=1).flatten(end_dim=1)
    return values


def _signs(counter: int, size: int, key: int, device: torch.device) -> Tensor:
    """One bit an element, 32 of each hash: set where the sign is negative."""
    lanes = torch.arange(size, device=device)
    return 1.0 - 2.0 * (hash32(key, counter + lanes // 32 * 32) >> lanes % 32 & 1).float()


def _float(number: float, like: Tensor) -> Tensor:
    return torch.tensor(number, dtype=torch.float32, device=like.device)
