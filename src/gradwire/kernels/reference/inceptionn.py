"""As many bits as an absolute error bound asks for: 32, 16, 8 or none, as INCEPTIONN has them."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.errors import PayloadError
from gradwire.kernels.reference._torch import as_bytes, pack, padded, unpack

RAW, HALF, BYTE = 3, 2, 1
"""Tags of values of 32, 16 and 8 bits; 0 is the tag of those that are not sent."""

HALF_UNIT = 2.0**-15
"""What the lowest bit of a 16-bit value is worth."""

LARGEST_BOUND = 14
"""With a smaller error than ``2**-14`` 8-bit values would have to be cut off."""


def inceptionn_tags_bytes(count: int) -> int:
    """Bytes of the tags of ``count`` values."""
    return padded(-(-count // 4))


def inceptionn_bytes(count: int) -> int:
    """See :meth:`gradwire.kernels.Kernels.inceptionn_bytes`."""
    return inceptionn_tags_bytes(count) + 4 * count


def check_bound(bound: int) -> None:
    """Raises unless the format can keep the bound."""
    if not 1 <= bound <= LARGEST_BOUND:
        raise PayloadError(f"bound={bound!r} is out of range; choose 1 <= bound <= {LARGEST_BOUND}")


def inceptionn_encode(values: Tensor, bound: int, payload: Tensor) -> int:
    """See :meth:`gradwire.kernels.Kernels.inceptionn_encode`."""
    check_bound(bound)
    magnitudes = values.abs()
    tags = torch.full_like(values, RAW, dtype=torch.int32)
    tags[magnitudes < 1] = HALF
    tags[magnitudes < 2.0 ** -(bound // 2)] = BYTE
    tags[magnitudes < 2.0**-bound] = 0
    negative = (values < 0).int()
    half, byte = tags == HALF, tags == BYTE
    halves = (magnitudes[half] / HALF_UNIT).int() | negative[half] << 15
    bytes_ = (magnitudes[byte] / _byte_unit(bound)).int() | negative[byte] << 7
    low_first = torch.stack((halves & 255, halves >> 8), 1).flatten().to(torch.uint8)
    room = 4 * inceptionn_tags_bytes(values.numel()) - values.numel()
    packed = torch.cat(
        (
            pack(torch.nn.functional.pad(tags, (0, room)), 2),
            as_bytes(values[tags == RAW]),
            low_first,
            bytes_.to(torch.uint8),
        )
    )
    used = padded(packed.numel())
    payload[:used] = 0
    payload[: packed.numel()] = packed
    return used


def inceptionn_decode(payload: Tensor, bound: int, values: Tensor) -> None:
    """See :meth:`gradwire.kernels.Kernels.inceptionn_decode`."""
    check_bound(bound)
    count = values.numel()
    head = inceptionn_tags_bytes(count)
    if payload.numel() < head:
        raise PayloadError(f"{payload.numel()} bytes are fewer than the tags of {count} values need")
    tags = unpack(payload[:head], 2)
    if bool(tags[count:].any()):
        raise PayloadError(f"there are tags beyond {count} values")
    tags = tags[:count]
    raws, halves, bytes_ = (int((tags == tag).sum()) for tag in (RAW, HALF, BYTE))
    size = head + padded(4 * raws + 2 * halves + bytes_)
    if payload.numel() != size:
        raise PayloadError(f"{payload.numel()} bytes are not the {size} that the tags call for")
    middle, last = head + 4 * raws, head + 4 * raws + 2 * halves
    values.zero_()
    values[tags == RAW] = payload[head:middle].clone().view(torch.float32)
    pairs = payload[middle:last].int().view(-1, 2)
    words = pairs[:, 0] | pairs[:, 1] << 8
    values[tags == HALF] = torch.where(words >> 15 == 1, -1.0, 1.0) * (words & 0x7FFF).float() * HALF_UNIT
    codes = payload[last : last + bytes_].int()
    values[tags == BYTE] = torch.where(codes >> 7 == 1, -1.0, 1.0) * (codes & 0x7F).float() * _byte_unit(bound)


def _byte_unit(bound: int) -> float:
    """What the lowest bit of an 8-bit value is worth."""
    return 2.0 ** -(bound // 2 + 7)
