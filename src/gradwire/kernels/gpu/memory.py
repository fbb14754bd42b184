"""What memories do with whole blocks."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from gradwire.deferred import Flag
from gradwire.kernels.gpu._jitted import INFINITE, INFINITY, compensated, magnitude_bits, tile_of
from gradwire.kernels.gpu._launch import jitted, launch, tiles_of
from gradwire.layout import Block


def accumulate(
    block: Block, gradient: Tensor, residual: Tensor, beta: float, gamma: float, when: Flag | None = None
) -> Flag:
    if when is None:
        return leave_all(block, gradient, residual, beta, gamma).lt(INFINITE.value)
    finite = leave_all(block, torch.where(when, gradient, torch.nan), residual, beta, gamma).lt(INFINITE.value)
    return finite & when


def leave_all(block: Block, gradient: Tensor, residual: Tensor, beta: float, gamma: float) -> Tensor:
    """``residual = t`` where finite; returns ``int32[]``, the bits of the largest ``|t|``."""
    tiles = tiles_of(block, gradient.device)
    peak = torch.zeros((), dtype=torch.int32, device=gradient.device)
    arguments = (tiles.table, gradient, residual, peak, beta, gamma)
    launch(_leave, tiles.count, *arguments, **tiles.shape)
    return peak


@jitted("beta", "gamma")
def _leave(table, gradient, residual, peak, beta, gamma, WIDTH: tl.constexpr, ALIGNED: tl.constexpr):
    start, count, _, _, _ = tile_of(table, ALIGNED)
    i = tl.arange(0, WIDTH)
    mask = i < count
    t, r = compensated(gradient, residual, start + i, mask, beta, gamma, True)
    tl.store(residual + start + i, tl.where(tl.abs(t) < INFINITY, t, r), mask=mask)
    tl.atomic_max(peak, tl.max(magnitude_bits(t), axis=0), sem="relaxed")
