"""What memories do with whole blocks."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gradwire.deferred import Flag, flag
from gradwire.kernels.cpu._compiled import add_compensated, values_and_memory
from gradwire.layout import Block


def accumulate(
    block: Block, gradient: Tensor, residual: Tensor, beta: float, gamma: float, when: Flag | None = None
) -> Flag:
    if when is not None and not when:
        return when
    values, memory, _ = values_and_memory(gradient, residual)
    return flag(bool(add_compensated(block.runs, values, memory, np.float32(beta), np.float32(gamma))))
