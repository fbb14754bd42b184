"""What memories do with whole blocks."""

from __future__ import annotations

from torch import Tensor

from gradwire.deferred import Flag, flag
from gradwire.kernels.compensated import Compensated
from gradwire.kernels.cpu._source import settle_all, source_of
from gradwire.layout import Block


def accumulate(
    block: Block, gradient: Tensor, residual: Tensor, beta: float, gamma: float, when: Flag | None = None
) -> Flag:
    if when is not None and not when:
        return when
    return flag(bool(settle_all(source_of(block, Compensated(gradient, residual, beta, gamma)))))
