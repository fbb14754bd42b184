"""float32 values kept in half the bits."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from gradwire.kernels.gpu._jitted import hash32, key_of_run, tile_of
from gradwire.kernels.gpu._launch import halves, jitted, launch, tiles_of
from gradwire.kernels.reference.narrow import INFINITE_BITS, LOW_BITS
from gradwire.layout import Block

_LOW_BITS = tl.constexpr(LOW_BITS)
_INFINITE_BITS = tl.constexpr(INFINITE_BITS)


def narrow(block: Block, values: Tensor, kept: Tensor, key: int) -> None:
    tiles = tiles_of(block, values.device)
    arguments = (tiles.table, values.view(torch.int32), kept.view(torch.int16), *halves(key))
    launch(_narrow, tiles.count, *arguments, **tiles.shape)


@jitted("key_low", "key_high")
def _narrow(table, values, kept, key_low, key_high, WIDTH: tl.constexpr, ALIGNED: tl.constexpr):
    """Adds random bits below the last one that stays, then cuts; what would become infinite is only cut."""
    start, count, _, _, row = tile_of(table, ALIGNED)
    i = tl.arange(0, WIDTH)
    mask = i < count
    words = tl.load(values + start + i, mask=mask, other=0).to(tl.uint32, bitcast=True)
    key = key_of_run(key_low, key_high, tl.load(row + 4))
    drawn = hash32(key, (tl.load(row + 5) + i).to(tl.uint32)) & _LOW_BITS
    up = (words + drawn) >> 16
    chosen = tl.where((up & 0x7FFF) == _INFINITE_BITS, words >> 16, up)
    tl.store(kept + start + i, chosen.to(tl.int32).to(tl.int16), mask=mask)
