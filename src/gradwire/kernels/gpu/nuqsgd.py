"""Levels at powers of two, drawn so that the mean is right."""

from __future__ import annotations

import triton
import triton.language as tl

from gradwire.kernels.gpu._jitted import inverse_of
from gradwire.kernels.gpu._measured import Jitted
from gradwire.kernels.gpu.qsgd import squares, uniform23, usable
from gradwire.kernels.gpu.quantise import CODES
from gradwire.kernels.reference.nuqsgd import NUQSGD


@triton.jit
def scale_of_norm(code: tl.constexpr, first, second, peak, negatives, numel):
    scale = usable(tl.sqrt(first))
    return scale, scale


@triton.jit
def _put(code: tl.constexpr, t, first, second, random, table):
    TOP: tl.constexpr = (1 << (code.bits - 1)) - 1
    drawn = (random >> 9).to(tl.int32)
    x = tl.abs(t) * inverse_of(first, tl.full(t.shape, 1.0, tl.float32))
    number = tl.minimum(((x.to(tl.int32, bitcast=True) + drawn) >> 23) - 127 + TOP, TOP)
    one = uniform23(random) < x * (2.0 ** (TOP - 1))
    number = tl.where(x < 2.0 ** (1 - TOP), one.to(tl.int32), number)
    return number | (t < 0).to(tl.int32) << (code.bits - 1)


@triton.jit
def _read(code: tl.constexpr, codes, first, second, table):
    TOP: tl.constexpr = (1 << (code.bits - 1)) - 1
    bits = ((codes & TOP) << 23) | ((codes >> (code.bits - 1)) << 31)
    return bits.to(tl.float32, bitcast=True) * (2.0 ** (127 - TOP)) * first


CODES[NUQSGD] = lambda code: Jitted(scale_of_norm, _put, _read, terms=squares, draws=True)
