"""Levels of a scale that all workers share, so that codes add up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.compensated import Compensated
from gradwire.kernels.gpu._jitted import INFINITY, LARGEST_SCALE, SMALLEST_SCALE, less
from gradwire.kernels.gpu._launch import tiles_of
from gradwire.kernels.gpu._measured import Jitted, measure
from gradwire.kernels.gpu.qsgd import uniform16
from gradwire.kernels.gpu.quantise import CODES, put_all, read_all
from gradwire.kernels.reference.integer import Integers
from gradwire.kernels.reference.qsgd import QSGD
from gradwire.layout import Block


def integer_scales(code: Integers, block: Block, source: Compensated, scales: Tensor) -> None:
    measure(CODES[Integers](code), code, tiles_of(block, scales.device), source, scales, 0, leave=True)
    scales.nan_to_num_(nan=torch.inf)


def integer_encode(
    code: Integers, block: Block, values: Tensor, subtract: bool, scales: Tensor, codes: Tensor, key: int
) -> None:
    source = Compensated(values, values if subtract else None, 0.0, 1.0)
    put_all(code._replace(workers=1), (block,), source, scales, codes, 0, key, agreed=True)


def integer_decode(code: Integers, block: Block, scales: Tensor, codes: Tensor, out: Tensor) -> None:
    read_all(code, (block,), 0, scales.view(torch.uint8), 0, codes[None], out, 1.0)


def euclidean_norms(block: Block, values: Tensor, norms: Tensor) -> None:
    code = QSGD(euclidean=True)
    measure(CODES[QSGD](code), code, tiles_of(block, norms.device), Compensated(values, None, 0.0, 1.0), norms, 0)


@triton.jit
def _scale(code: tl.constexpr, first, second, peak, negatives, numel):
    largest = peak.to(tl.float32, bitcast=True)
    return largest, largest


@triton.jit
def _put(code: tl.constexpr, t, first, second, random, table):
    LEVELS: tl.constexpr = code.levels
    usable = first >= SMALLEST_SCALE
    divisor = tl.where(usable, tl.where(first > LARGEST_SCALE, LARGEST_SCALE, first), 1.0)
    inverse = tl.where(usable, tl.div_rn(tl.full(t.shape, LEVELS, tl.float32), divisor), 0.0)
    number = (t * inverse + (uniform16(random) + LEVELS)).to(tl.int32)
    return tl.maximum(tl.minimum(number, 2 * LEVELS), 0)


@triton.jit
def _read(code: tl.constexpr, codes, first, second, table):
    LEVELS: tl.constexpr = code.levels
    ZERO: tl.constexpr = code.levels * code.workers
    smaller = tl.where(first > LARGEST_SCALE, LARGEST_SCALE, first)
    step = tl.where(first >= SMALLEST_SCALE, tl.div_rn(smaller, tl.full(first.shape, LEVELS, tl.float32)), 0.0)
    step = tl.where(tl.abs(first) < INFINITY, step, float("nan")) * (1.0 / code.workers)
    return tl.minimum(less(codes, ZERO), ZERO * 1.0) * step


CODES[Integers] = lambda code: Jitted(_scale, _put, _read, draws=True)
