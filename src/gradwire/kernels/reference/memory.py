"""The memory by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.deferred import Flag
from gradwire.kernels.reference._torch import keep
from gradwire.layout import Block


def accumulate(
    block: Block, gradient: Tensor, residual: Tensor, beta: float, gamma: float, when: Flag | None = None
) -> Flag:
    """``residual = beta * residual + gamma * gradient`` over the block's runs; returns whether all is finite.

    With a flag that does not hold nothing is done, and what is returned does not hold either.
    """
    finite = torch.ones((), dtype=torch.bool, device=gradient.device) if when is None else when
    for start, length, _ in block.runs.tolist():
        kept = residual[start : start + length]
        values = kept * beta + gradient[start : start + length] * gamma
        keep(kept, values if when is None else torch.where(when, values, torch.nan))
        finite = finite & values.isfinite().all()
    return finite
