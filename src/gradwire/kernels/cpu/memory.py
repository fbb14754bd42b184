"""What memories do with whole blocks."""

from __future__ import annotations

from torch import Tensor

from gradwire.deferred import Flag, flag
from gradwire.kernels.compensated import Compensated
from gradwire.kernels.cpu._source import settle_all, source_of, within
from gradwire.kernels.parts import of_runs, side_by_side
from gradwire.layout import Block


def accumulate(
    block: Block, gradient: Tensor, residual: Tensor, beta: float, gamma: float, when: Flag | None = None
) -> Flag:
    if when is not None and not when:
        return when
    source = source_of(block, Compensated(gradient, residual, beta, gamma))
    return flag(all(side_by_side(lambda part: settle_all(within(source, part.block)), of_runs(block))))
