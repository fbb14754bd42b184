"""Levels wherever they are wanted, drawn so that the mean is right."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.deferred import placed
from gradwire.kernels.gpu._jitted import inverse_of
from gradwire.kernels.gpu._measured import Jitted
from gradwire.kernels.gpu.nuqsgd import scale_of_norm
from gradwire.kernels.gpu.qsgd import squares, uniform16
from gradwire.kernels.gpu.quantise import CODES
from gradwire.kernels.reference.nonuniform import NonUniform


@lru_cache
def _table(levels: tuple[float, ...], device: torch.device) -> Tensor:
    return placed(np.array(levels, dtype=np.float32), device)


@triton.jit
def _put(code: tl.constexpr, t, first, second, random, table):
    TOP: tl.constexpr = (1 << (code.bits - 1)) - 1
    x = tl.abs(t) * inverse_of(first, tl.full(t.shape, 1.0, tl.float32))
    below = tl.zeros(t.shape, tl.int32)
    for halving in tl.static_range(code.bits - 1):
        above = below + (1 << (code.bits - 2 - halving))
        below = tl.where(tl.load(table + above) <= x, above, below)
    below = tl.minimum(below, TOP - 1)
    low = tl.load(table + below)
    at = below.to(tl.float32) + tl.div_rn(x - low, tl.load(table + below + 1) - low)
    number = tl.minimum((at + uniform16(random)).to(tl.int32), TOP)
    return number | (t < 0).to(tl.int32) << (code.bits - 1)


@triton.jit
def _read(code: tl.constexpr, codes, first, second, table):
    TOP: tl.constexpr = (1 << (code.bits - 1)) - 1
    bits = tl.load(table + (codes & TOP)).to(tl.int32, bitcast=True)
    return (bits | ((codes >> (code.bits - 1)) << 31)).to(tl.float32, bitcast=True) * first


def _jitted(code: NonUniform) -> Jitted:
    return Jitted(
        *(scale_of_norm, _put, _read, squares),
        draws=True,
        table=lambda device: _table(code.levels, device),
        constant=code._replace(levels=()),
    )


CODES[NonUniform] = _jitted
