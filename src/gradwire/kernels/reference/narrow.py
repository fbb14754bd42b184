"""float32 values kept in half the bits."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.layout import Block
from gradwire.randomness import hash32, run_keys

LOW_BITS = 0xFFFF
INFINITE_BITS = 0x7F80


def narrow(block: Block, values: Tensor, kept: Tensor, key: int) -> None:
    """``kept``, bfloat16, takes the finite ``values`` over the block's runs: exactly on average, never infinite.

    Each is rounded to one of its two neighbours, to the farther one with a probability that is its distance from
    the nearer one as a share of theirs.
    """
    keys = run_keys(key, block.streams).tolist()
    for run, (start, length, _) in enumerate(block.runs.tolist()):
        words = values[start : start + length].view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        counters = torch.arange(length, device=values.device) + int(block.origins[run])
        up = (words + (hash32(keys[run], counters) & LOW_BITS)) >> 16
        down = words >> 16
        chosen = torch.where(up & 0x7FFF == INFINITE_BITS, down, up)
        signed = torch.where(chosen >= 0x8000, chosen - 0x10000, chosen).to(torch.int16)
        kept[start : start + length] = signed.view(torch.bfloat16)
