"""Eight bits a value, of a table that is finer near zero."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.deferred import shared
from gradwire.kernels.gpu._jitted import SMALLEST_SCALE, inverse_of
from gradwire.kernels.gpu._measured import Jitted
from gradwire.kernels.gpu.quantise import CODES
from gradwire.kernels.reference.dynamic import CELL_BITS, Dynamic, cells, magnitudes

_FIRST, _TABLE = cells()
_FIRST_CELL = tl.constexpr(_FIRST)
_CELLS = tl.constexpr(len(_TABLE))
_CELL_BITS = tl.constexpr(CELL_BITS)
_OFFSET = tl.constexpr((1 << CELL_BITS) - 1)


@cache
def _tables(device: torch.device) -> Tensor:
    """``int32``: the cells, then the bits of what the 128 codes of magnitudes stand for."""
    words = np.concatenate((_TABLE, magnitudes().numpy().view(np.uint32)))
    return shared(words.view(np.int32), device)


@triton.jit
def _scale(code: tl.constexpr, first, second, peak, negatives, numel):
    largest = peak.to(tl.float32, bitcast=True)
    scale = tl.where(largest >= SMALLEST_SCALE, largest, 0.0)
    return scale, scale


@triton.jit
def _put(code: tl.constexpr, t, first, second, random, table):
    word = (tl.abs(t) * inverse_of(first, tl.full(t.shape, 1.0, tl.float32))).to(tl.int32, bitcast=True)
    cell = tl.minimum(tl.maximum((word >> _CELL_BITS) - _FIRST_CELL, 0), _CELLS - 1)
    number = (tl.load(table + cell) + (word & _OFFSET)) >> _CELL_BITS
    return number | (t < 0).to(tl.int32) << 7


@triton.jit
def _read(code: tl.constexpr, codes, first, second, table):
    bits = tl.load(table + _CELLS + (codes & 127))
    return (bits | ((codes >> 7) << 31)).to(tl.float32, bitcast=True) * first


CODES[Dynamic] = lambda code: Jitted(_scale, _put, _read, table=_tables)
