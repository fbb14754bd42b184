"""Five digits of base 3 a byte, each times a scale."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.reference._torch import segment_of_positions, write_mean
from gradwire.layout import Block, aligned

DIGITS = 5
"""Digits of base 3 in a byte."""


def trits_stride(positions: int) -> int:
    """How many bytes hold ``positions`` digits, and how far apart the digits of one byte are."""
    return aligned(-(-positions // DIGITS))


def trits_payload_bytes(block: Block) -> int:
    """See :meth:`gradwire.kernels.Kernels.trits_payload_bytes`."""
    return 4 * block.segment_count + trits_stride(block.positions)


def pack_trits(digits: Tensor) -> Tensor:
    """Packs digits 0, 1, 2; byte ``j`` holds digits ``j``, ``j + stride``, ..., the first as the lowest."""
    stride = trits_stride(digits.numel())
    rows = torch.nn.functional.pad(digits, (0, DIGITS * stride - digits.numel())).view(DIGITS, stride)
    weights = torch.tensor([3**row for row in range(DIGITS)], device=digits.device)
    return (rows * weights[:, None]).sum(0).to(torch.uint8)


def unpack_trits(packed: Tensor, positions: int) -> Tensor:
    """Inverse of :func:`pack_trits`, as int32; reads any byte modulo ``3**DIGITS``."""
    rows = [packed.to(torch.int32) // 3**row % 3 for row in range(DIGITS)]
    return torch.cat(rows)[:positions]


def trits_decode(block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
    """See :meth:`gradwire.kernels.Kernels.trits_decode`."""
    head = 4 * block.segment_count
    segments = segment_of_positions(block, out.device)
    rows = torch.zeros(len(payloads), block.positions, device=out.device)
    for row, payload in zip(rows, payloads, strict=True):
        scales = payload[:head].contiguous().view(torch.float32)
        row.copy_((unpack_trits(payload[head:], block.positions) - 1).float() * scales[segments])
    write_mean(block, rows, out, weight)
