"""Averages over those who sent something."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.reference.sparse import _places
from gradwire.layout import Block


def scatter_mean(block: Block, positions: Tensor, values: Tensor, out: Tensor) -> None:
    """``out`` = the mean over those sparse rows, ascending each, that have the position; zero elsewhere.

    Raises:
        PayloadError: If a position lies in no run; nothing has been written then.
    """
    places = [_places(block, row) for row in positions]
    senders = torch.zeros_like(out)
    for start, length, _ in block.runs.tolist():
        out[start : start + length] = 0
    for place, row in zip(places, values, strict=True):
        out[place] = out[place] + row
        senders[place] += 1
    for start, length, _ in block.runs.tolist():
        out[start : start + length] /= senders[start : start + length].clamp(min=1)
