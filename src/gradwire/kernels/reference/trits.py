"""Five digits of base 3 a byte."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.code import TRITS, trits_stride


def pack_trits(digits: Tensor) -> Tensor:
    """Packs digits 0, 1, 2; byte ``j`` holds digits ``j``, ``j + stride``, ..., the first as the lowest."""
    stride = trits_stride(digits.numel())
    rows = torch.nn.functional.pad(digits, (0, TRITS * stride - digits.numel())).view(TRITS, stride)
    weights = torch.tensor([3**row for row in range(TRITS)], device=digits.device)
    return (rows * weights[:, None]).sum(0).to(torch.uint8)


def unpack_trits(packed: Tensor, positions: int) -> Tensor:
    """Inverse of :func:`pack_trits`, as int32; reads any byte modulo ``3**TRITS``."""
    rows = [packed.to(torch.int32) // 3**row % 3 for row in range(TRITS)]
    return torch.cat(rows)[:positions]
