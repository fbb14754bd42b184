"""Signs without a scale, where zeros take a random one."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradwire.kernels.reference._torch import draws, keep, keep_all, largest, pack, pieces_of, write_payload
from gradwire.layout import Block
from gradwire.randomness import run_keys


def vote_encode(
    block: Block, gradient: Tensor, residual: Tensor | None, beta: float, gamma: float, payload: Tensor, key: int
) -> None:
    """See :meth:`gradwire.kernels.Kernels.vote_encode`. The random sign is the highest bit of an element's hash."""
    keys = run_keys(key, block.streams).tolist()
    scales = torch.ones(block.segment_count, device=gradient.device)
    negative = torch.zeros(block.positions, dtype=torch.uint8, device=gradient.device)
    for segment in range(block.segment_count):
        pieces = pieces_of(block, segment, gradient, residual, beta, gamma)
        if math.isnan(largest(pieces)):
            scales[segment] = torch.nan
            keep_all(pieces)
            continue
        for piece in pieces:
            minus = torch.where(piece.t == 0, draws(block, keys, piece) >> 31 == 1, piece.t < 0)
            negative[piece.span] = minus
            keep(piece.memory, piece.t - torch.where(minus, -1.0, 1.0))
    write_payload(payload, scales, pack(negative, 1))
