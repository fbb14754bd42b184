"""Checksums of 4-byte words."""

from __future__ import annotations

import torch
from torch import Tensor


def checksums(words: Tensor, sums: Tensor) -> None:
    """Sums up the words of each row, taken as unsigned and weighted by 1, 3, 5, …, modulo ``2**64``.

    Weights are modulo ``2**32``.

    Args:
        words: ``int32[n, m]``, contiguous.
        sums: ``int64[n]``, to be filled.
    """
    weights = (2 * torch.arange(words.shape[1], device=words.device) + 1).bitwise_and_(0xFFFFFFFF)
    sums.copy_((words.long().bitwise_and_(0xFFFFFFFF) * weights).sum(1))
