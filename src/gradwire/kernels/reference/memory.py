"""The memory by itself."""

from __future__ import annotations

from torch import Tensor

from gradwire.kernels.reference._torch import compensated, keep
from gradwire.layout import Block


def accumulate(block: Block, gradient: Tensor, residual: Tensor, beta: float, gamma: float) -> bool:
    """``residual = beta * residual + gamma * gradient`` over the block's runs; returns whether all is finite."""
    finite = True
    for start, length, _ in block.runs.tolist():
        kept = residual[start : start + length]
        values = compensated(gradient[start : start + length], kept, beta, gamma)
        finite = finite and bool(values.isfinite().all())
        keep(kept, values)
    return finite
