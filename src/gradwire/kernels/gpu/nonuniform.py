"""Levels wherever they are wanted, drawn so that the mean is right."""

from __future__ import annotations

import triton
import triton.language as tl

from gradwire.kernels.gpu._jitted import inverse_of
from gradwire.kernels.gpu._measured import Jitted
from gradwire.kernels.gpu.qsgd import squares, usable
from gradwire.kernels.gpu.quantise import CODES
from gradwire.kernels.reference.nonuniform import NonUniform, table


@triton.jit
def _scale(code: tl.constexpr, first, second, peak, negatives, numel):
    scale = usable(tl.sqrt(first))
    return scale, scale


@triton.jit
def _put(code: tl.constexpr, t, first, second, random, levels):
    HALF: tl.constexpr = 1 << (code.bits - 1)
    x = tl.abs(t) * inverse_of(first, tl.full(t.shape, 1.0, tl.float32))
    below = tl.zeros(t.shape, tl.int32)
    for power in tl.static_range(2, code.bits + 1):
        further = below + (1 << (code.bits - power))
        below = tl.where(tl.load(levels + further) <= x, further, below)
    below = tl.minimum(below, HALF - 2)
    low = tl.load(levels + below)
    high = tl.load(levels + below + 1)
    share = tl.div_rn(x - low, high - low)
    drawn = (random >> 9).to(tl.int32).to(tl.float32) * (2.0**-23) + (2.0**-24) < share
    codes = below + drawn.to(tl.int32) | (t < 0).to(tl.int32) << (code.bits - 1)
    return codes, tl.load(levels + codes) * first


@triton.jit
def _read(code: tl.constexpr, codes, first, second, levels):
    return tl.load(levels + codes) * first


def _jitted(code: NonUniform) -> Jitted:
    return Jitted(
        code.bits, _scale, _put, _read, terms=squares, draws=True, table=lambda device: table(code.levels, device)
    )


CODES[NonUniform] = _jitted
