"""What both sides of a dead zone's codes know: their tables, classes and activities."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.deferred import shared
from gradwire.kernels.reference import deadzone, deadzone_codes

NEGATIVE_LEVEL = tl.constexpr(1 << 30)
AS_IT_IS = tl.constexpr(-1)
ROUNDING = tl.constexpr(deadzone.ROUNDING)
THRESHOLD = tl.constexpr(deadzone.THRESHOLD)
LARGEST = tl.constexpr(deadzone.LARGEST)
LIMIT = tl.constexpr(deadzone.LIMIT)
MEMORY = tl.constexpr(deadzone.MEMORY)
EVEN, FRESH = tl.constexpr(64), tl.constexpr(128)
LEAST_ACTIVE = tl.constexpr(-64 * 64)
MOST_ACTIVE = tl.constexpr(64 * deadzone_codes.LEVEL_CLASSES)
CONTEXTS = tl.constexpr(deadzone_codes.CONTEXTS)
QUIETEST = tl.constexpr(deadzone_codes.QUIETEST)
LEVEL_BITS = tl.constexpr(deadzone_codes.LEVEL_BITS)
RAW = tl.constexpr(deadzone_codes.RAW)
ESCAPE = tl.constexpr(deadzone_codes.ESCAPE)
ESCAPED_BITS = tl.constexpr(deadzone_codes.ESCAPED_BITS)
LONGEST = tl.constexpr(deadzone_codes.LONGEST)
CODE = tl.constexpr((1 << deadzone_codes.LONGEST) - 1)
ESCAPED = tl.constexpr((1 << deadzone_codes.ESCAPED_BITS) - 1)


@lru_cache
def code_tables(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Lengths and words of symbols as ``int32``, and what bits say as ``int16``, each by context.

    What bits say is a symbol, and above :data:`LONGEST` bits of it its length: the table is so small that a processor
    keeps most of it.
    """
    codes = deadzone_codes.codes()
    said = codes.symbols.astype(np.uint16).view(np.int16)
    return (
        shared(codes.lengths.ravel().astype(np.int32), device),
        shared(codes.words.ravel().astype(np.int32), device),
        shared(said.ravel(), device),
    )


@triton.jit
def class_of(number):
    """See the reference's; of numbers below 2**24, by the exponent and the highest bit of the mantissa."""
    found = (number.to(tl.float32).to(tl.int32, bitcast=True) >> 22) - 255
    return tl.maximum(found, 0)


@triton.jit
def width_of(number):
    """How many bits say which number of a class it is."""
    return tl.maximum(((number + 1) >> 1) - 1, 0)


@triton.jit
def first_of(number):
    """The first number of a class, of those below 2**30."""
    return tl.where(number > 0, (2 + ((number + 1) & 1)) << width_of(number), 1)


@triton.jit
def ones(width):
    """So many bits, all of them set."""
    return (tl.full(width.shape, 1, tl.int64) << width.to(tl.int64)) - 1


@triton.jit
def context_of(activity):
    return tl.minimum(tl.maximum((activity >> 6) - QUIETEST, 0), CONTEXTS - 1)


@triton.jit
def following(activity, gap_class, level_class):
    return activity + (((level_class - gap_class) * 64 - activity) >> MEMORY)


@triton.jit
def turned(activity, turn):
    """How active it is at a code and after it, of which a byte says what it does.

    That is how much the level's class is above the gap's, and whether it is the first of its tile.
    """
    activity = tl.where(turn >= FRESH, 0, activity)
    return activity, activity + (((((turn & (FRESH - 1)) - EVEN) * 64) - activity) >> MEMORY)


@triton.jit
def stands_for(level, first, second, others, step):
    """The magnitude of a level."""
    offset = tl.where(level == 1, first, tl.where(level == 2, second, others))
    magnitude = (level.to(tl.float32) + offset) * step
    return tl.where(magnitude > LARGEST, LARGEST, magnitude)
