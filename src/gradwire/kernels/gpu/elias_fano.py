"""Ascending positions in about two bits more than their entropy.

Whether they are ascending the host is told a step later; until then other kernels stay within their buffers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.deferred import expect
from gradwire.errors import PayloadError
from gradwire.kernels.gpu._launch import jitted, launch
from gradwire.kernels.reference.elias_fano import elias_fano_layout

_WIDTH = 1024


def elias_fano_encode(positions: Tensor, universe: int, payload: Tensor) -> None:
    count = positions.numel()
    if not count:
        return
    low, high, width = _parts(payload, count, universe)
    payload.zero_()
    wrong = torch.zeros((), dtype=torch.int32, device=positions.device)
    programs = triton.cdiv(count, _WIDTH)
    launch(_encode, programs, positions, count, universe, width, low, high, wrong, WIDTH=_WIDTH)
    expect(wrong == 0, lambda: PayloadError(f"positions to encode must be ascending, distinct and in [0, {universe})"))


def elias_fano_decode(payload: Tensor, universe: int, positions: Tensor) -> None:
    count = positions.numel()
    if not count:
        return
    low, high, width = _parts(payload, count, universe)
    programs, words = triton.cdiv(len(high), _WIDTH), len(high)
    ends = torch.empty(programs, dtype=torch.int64, device=payload.device)
    launch(_count, programs, high, words, ends, WIDTH=_WIDTH)
    torch.cumsum(ends, 0, out=ends)
    launch(_decode, programs, low, high, words, ends, width, positions, count, WIDTH=_WIDTH)
    wrong = (ends[-1] != count).int()
    launch(_check, triton.cdiv(count, _WIDTH), positions, count, universe, wrong, WIDTH=_WIDTH)
    what = f"{count} ascending, distinct positions below {universe}"
    expect(wrong == 0, lambda: PayloadError(f"Elias-Fano bytes are not those of {what}"))


def _parts(payload: Tensor, count: int, universe: int) -> tuple[Tensor, Tensor, int]:
    """The words, of which the low bits come first, those of the high bits, and how many low bits a position has."""
    width, boundary = elias_fano_layout(count, universe, payload.numel())
    words = payload.view(torch.int32)
    return words, words[boundary // 4 :], width


@triton.jit
def _ascending(positions, i, count, universe):
    """Positions, and which of them are above the one before, and below the universe."""
    position = tl.load(positions + i, mask=i < count, other=0)
    before = tl.load(positions + i - 1, mask=(i > 0) & (i < count), other=-1)
    return position, (position > before) & (position < universe) & (position >= 0)


@jitted("positions", "count", "universe", "width", "low", "high")
def _encode(positions, count, universe, width, low, high, wrong, WIDTH: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    position, right = _ascending(positions, i, count, universe)
    mask = i < count
    tl.atomic_max(wrong, tl.max((mask & (right == 0)).to(tl.int32), axis=0), sem="relaxed")
    mask = mask & right
    bit = (position >> width) + i
    one = (tl.full((WIDTH,), 1, tl.int64) << (bit & 31)).to(tl.int32)
    tl.atomic_or(high + (bit >> 5), one, mask=mask, sem="relaxed")
    first = i * width
    bits = (position & ((tl.full((WIDTH,), 1, tl.int64) << width) - 1)).to(tl.uint64) << (first & 31).to(tl.uint64)
    lower = (bits & tl.full((), 0xFFFFFFFF, tl.uint64)).to(tl.uint32).to(tl.int32, bitcast=True)
    upper = (bits >> 32).to(tl.uint32).to(tl.int32, bitcast=True)
    tl.atomic_or(low + (first >> 5), lower, mask=mask & (lower != 0), sem="relaxed")
    tl.atomic_or(low + (first >> 5) + 1, upper, mask=mask & (upper != 0), sem="relaxed")


@triton.jit
def _ones(word):
    """How many bits of a uint32 are set."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@jitted("high", "words")
def _count(high, words, ends, WIDTH: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    word = tl.load(high + i, mask=i < words, other=0).to(tl.uint32, bitcast=True)
    tl.store(ends + tl.program_id(0), tl.sum(_ones(word), axis=0).to(tl.int64))


@jitted("low", "high", "words", "width", "positions", "count")
def _decode(low, high, words, ends, width, positions, count, WIDTH: tl.constexpr):
    """Each bit that is set says how far the position is whose number is that of set bits before."""
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    word = tl.load(high + i, mask=i < words, other=0).to(tl.uint32, bitcast=True)
    ones = _ones(word)
    number = tl.load(ends + tl.program_id(0)) - tl.sum(ones, axis=0) + tl.cumsum(ones, axis=0) - ones
    for bit in range(32):
        here = ((word >> bit) & 1) != 0
        mask = here & (number < count)
        first = number * width
        lower = tl.load(low + (first >> 5), mask=mask, other=0).to(tl.uint32, bitcast=True)
        crosses = (first & 31) + width > 32
        upper = tl.load(low + (first >> 5) + 1, mask=mask & crosses, other=0).to(tl.uint32, bitcast=True)
        bits = ((upper.to(tl.uint64) << 32) | lower.to(tl.uint64)) >> (first & 31).to(tl.uint64)
        rest = bits.to(tl.int64, bitcast=True) & ((tl.full((WIDTH,), 1, tl.int64) << width) - 1)
        tl.store(positions + number, ((i * 32 + bit - number) << width) + rest, mask=mask)
        number += here.to(tl.int64)


@jitted("positions", "count", "universe")
def _check(positions, count, universe, wrong, WIDTH: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    _, right = _ascending(positions, i, count, universe)
    tl.atomic_max(wrong, tl.max(((i < count) & (right == 0)).to(tl.int32), axis=0), sem="relaxed")
