"""What a dead zone's step is chosen by, and rounding by chance. The step itself the CPU chooses, by a small sample."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.compensated import Compensated
from gradwire.kernels.gpu._jitted import INFINITY, hash32, inverse_of, key_of_run, negated, tile_of
from gradwire.kernels.gpu._launch import halves, jitted, launch, tiles_of
from gradwire.kernels.gpu._measured import Jitted, measure
from gradwire.kernels.gpu.sign import magnitudes_or_squares
from gradwire.kernels.reference import deadzone
from gradwire.kernels.reference._torch import LANES
from gradwire.kernels.reference.deadzone_step import SAMPLED_CHUNK, TURNS, chunks_sampled, sampling
from gradwire.kernels.reference.sign import Sign
from gradwire.layout import Block

_SMALLEST_SCALE = tl.constexpr(deadzone.SMALLEST_SCALE)
_LIMIT = tl.constexpr(deadzone.LIMIT)


def deadzone_scales(block: Block, source: Compensated) -> Tensor:
    device = source.gradient.device
    scales = torch.empty(block.segment_count, dtype=torch.float32, device=device)
    measure(_MEAN, Sign(), tiles_of(block, device), source, scales, 0, leave=True)
    return scales


def deadzone_sample(block: Block, values: Tensor, scales: Tensor, room: int, turn: int = 0) -> Tensor:
    chunks, name = chunks_sampled(block, room, turn), f"sample {turn % TURNS}"
    sample = torch.zeros(-(-int(chunks[:, 1].sum()) // LANES) * LANES, dtype=torch.float32, device=values.device)
    table = tiles_of(block, values.device).asked(name, np.array([sampling(block, room)]), lambda: chunks)
    launch(_sample, len(chunks), table, values, scales, sample, WIDTH=SAMPLED_CHUNK, warps=2)
    return sample


def deadzone_dither(block: Block, values: Tensor, steps: Tensor, key: int, out: Tensor) -> None:
    tiles = tiles_of(block, values.device)
    launch(_dither, tiles.count, tiles.table, values, steps, *halves(key), out, **tiles.shape)


@triton.jit
def step_in(steps, segment, WIDTH: tl.constexpr):
    """A segment's step and its inverse; 0 for both where nothing is sent."""
    step = tl.broadcast_to(tl.load(steps + segment + tl.arange(0, 1)), (WIDTH,))
    step = tl.where((step > 0) & (step < INFINITY), step, 0.0)
    return step, inverse_of(step, tl.full((WIDTH,), 1.0, tl.float32))


@triton.jit
def _scale(code: tl.constexpr, first, second, peak, negatives, numel):
    mean = (first / numel.to(tl.float64)).to(tl.float32)
    scale = tl.where(mean < _SMALLEST_SCALE, 0.0, mean)
    return scale, scale


_MEAN = Jitted(_scale, None, None, terms=magnitudes_or_squares)


@jitted()
def _sample(table, values, scales, sample, WIDTH: tl.constexpr):
    row = table + 4 * tl.program_id(0).to(tl.int64)
    start = tl.load(row)
    scale = tl.broadcast_to(tl.load(scales + tl.load(row + 2) + tl.arange(0, 1)), (WIDTH,))
    i = tl.arange(0, WIDTH)
    mask = i < tl.load(row + 1)
    magnitudes = tl.abs(tl.load(values + start + i, mask=mask, other=0.0))
    relative = tl.where(scale > 0, magnitudes * inverse_of(scale, tl.full((WIDTH,), 1.0, tl.float32)), 0.0)
    tl.store(sample + tl.load(row + 3) + i, relative, mask=mask)


@jitted("key_low", "key_high")
def _dither(table, values, steps, key_low, key_high, out, WIDTH: tl.constexpr, ALIGNED: tl.constexpr):
    start, count, _, segment, row = tile_of(table, ALIGNED)
    i = tl.arange(0, WIDTH)
    mask = i < count
    step, inverse = step_in(steps, segment, WIDTH)
    t = tl.load(values + start + i, mask=mask, other=0.0)
    relative = tl.abs(t) * inverse
    key = key_of_run(key_low, key_high, tl.load(row + 4))
    drawn = (hash32(key, (tl.load(row + 5) + i).to(tl.uint32)) >> 8).to(tl.float32) * 5.9604644775390625e-08
    level = tl.minimum(relative + drawn, _LIMIT * 2.0).to(tl.int32)
    rounded = negated(level.to(tl.float32) * step, t < 0)
    rounded = tl.where(relative < _LIMIT, rounded, t)
    tl.store(out + start + i, tl.where(step > 0, rounded, 0.0), mask=mask)
