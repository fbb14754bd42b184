"""Orthonormal rows, a program a matrix: inner products are exact sums, so its bits are those of any other order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire import exact
from gradwire.kernels.gpu._jitted import INFINITE, magnitude_bits
from gradwire.kernels.gpu._launch import jitted, launch

TILE = 2048
"""Values that a program holds at once, of all rows."""

_TO_GRID = tl.constexpr(exact.TO_GRID)
_NEWTON_STEPS = tl.constexpr(exact.NEWTON_STEPS)


def orthonormalise(rows: Tensor) -> None:
    k, r, n = rows.shape
    left, axes = torch.empty((2, k, r, n), dtype=torch.float64, device=rows.device)
    height = triton.next_power_of_2(r)
    width = max(TILE // height, 16)
    launch(_orthonormalise, k, rows, left, axes, r, n, HEIGHT=height, WIDTH=width, warps=8)


@triton.jit
def _inner(a, b):
    """Sums of products along rows, each rounded to the grid, where any order gives the same."""
    return tl.sum(a * b + _TO_GRID - _TO_GRID, axis=1)


@triton.jit
def _exponent(sizes):
    """``e`` of ``sizes = m * 2**e`` with m in [1/2, 1); 0 for 0."""
    exponent = ((sizes.to(tl.int64, bitcast=True) >> 52) & 0x7FF) - 1022
    return tl.where(sizes == 0, 0, exponent)


@triton.jit
def _power(exponent):
    """``2.0**exponent``."""
    return ((exponent + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _to_half(square):
    """What brings a length to [1/2, 1) whose square is given."""
    return _power(-((_exponent(square) + 1) >> 1))


@triton.jit
def _columns(matrix, r, n, first, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Numbers of rows and of columns from ``first`` on, where they lie, and which there are."""
    i = tl.arange(0, HEIGHT)[:, None]
    c = first + tl.arange(0, WIDTH)[None, :]
    return i, c, matrix + i.to(tl.int64) * n + c, (i < r) & (c < n)


@jitted("r", "n")
def _orthonormalise(rows, left, axes, r, n, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """As the reference; a row is divided by powers of two only, so that it may be multiplied by all of them at once."""
    wide = n + tl.full((), 0, tl.int64)
    matrix = tl.program_id(0) * r * wide
    peaks = tl.zeros((HEIGHT,), tl.int32)
    for first in range(0, n, WIDTH):
        _, _, at, mask = _columns(matrix, r, n, first, HEIGHT, WIDTH)
        peaks = tl.maximum(peaks, tl.max(magnitude_bits(tl.load(rows + at, mask=mask, other=0.0)), axis=1))
    finite = tl.max(peaks, axis=0) < INFINITE
    peaks = tl.where(finite, peaks, 0).to(tl.float32, bitcast=True).to(tl.float64)
    length = tl.zeros((HEIGHT,), tl.float64) + n
    unit = _power(-(_exponent(peaks) + _exponent(length)))[:, None]
    squares = tl.zeros((HEIGHT,), tl.float64)
    for first in range(0, n, WIDTH):
        _, _, at, mask = _columns(matrix, r, n, first, HEIGHT, WIDTH)
        t = tl.where(finite, tl.load(rows + at, mask=mask, other=0.0), 0.0).to(tl.float64) * unit
        squares += _inner(t, t)
    unit *= _to_half(squares)[:, None]
    for first in range(0, n, WIDTH):
        i, c, at, mask = _columns(matrix, r, n, first, HEIGHT, WIDTH)
        t = tl.where(finite, tl.load(rows + at, mask=mask, other=0.0), 0.0).to(tl.float64) * unit
        tl.store(left + at, t, mask=mask)
        tl.store(axes + at, (i == c).to(tl.float64), mask=mask)
    tl.debug_barrier()

    number = tl.arange(0, HEIGHT)
    gains = tl.zeros((HEIGHT,), tl.float64)
    for j in range(r):
        gain, bend, scale = _reflection(left + matrix + j * wide, j, n, WIDTH)
        gains = tl.where(number == j, gain, gains)
        tl.debug_barrier()
        _bend(left + matrix + j * wide, j, n, bend, scale, WIDTH)
        tl.debug_barrier()
        _reflect(left, left, matrix, j, j + 1, r, n, gain, HEIGHT, WIDTH)
    for back in range(r):
        j = r - 1 - back
        gain = tl.sum(tl.where(number == j, gains, 0.0), axis=0)
        _reflect(left, axes, matrix, j, j, r, n, gain, HEIGHT, WIDTH)
    for first in range(0, n, WIDTH):
        _, _, at, mask = _columns(matrix, r, n, first, HEIGHT, WIDTH)
        t = tl.load(axes + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(rows + at, tl.where(finite, t, float("nan")), mask=mask)


@triton.jit
def _reflection(row, j, n, WIDTH: tl.constexpr):
    """Of a row from its element ``j`` on: the reflection's gain, what its first element is changed by, and its unit."""
    c = tl.arange(0, WIDTH)[None, :]
    peak = tl.zeros((1,), tl.float64)
    for first in range(0, n, WIDTH):
        mask = (first + c >= j) & (first + c < n)
        peak = tl.maximum(peak, tl.max(tl.abs(tl.load(row + first + c, mask=mask, other=0.0)), axis=1))
    length = tl.zeros((1,), tl.float64) + (n - j)
    scale = _power(-(_exponent(peak) + _exponent(length)))
    square = tl.zeros((1,), tl.float64)
    for last in tl.static_range(2):
        square = tl.zeros((1,), tl.float64)
        for first in range(0, n, WIDTH):
            mask = (first + c >= j) & (first + c < n)
            x = tl.load(row + first + c, mask=mask, other=0.0) * scale[:, None]
            square += _inner(x, x)
        if last == 0:
            scale *= _to_half(square)
    size = tl.full((1,), 0.75, tl.float64)
    for _ in tl.static_range(_NEWTON_STEPS):
        size = (size + square / size) / 2
    size = tl.where(square == 0, 0.0, size)
    start = tl.load(row + j + tl.arange(0, 1)) * scale
    divisor = tl.where(square == 0, 1.0, size * (size + tl.abs(start)))
    gain = tl.where(square == 0, 0.0, 4.0 / divisor)
    return tl.sum(gain, axis=0), tl.sum(tl.where(start < 0, size * -1.0, size), axis=0), tl.sum(scale, axis=0)


@triton.jit
def _bend(row, j, n, bend, scale, WIDTH: tl.constexpr):
    """Makes of a row from its element ``j`` on what others are reflected by."""
    c = tl.arange(0, WIDTH)
    for first in range(0, n, WIDTH):
        mask = (first + c >= j) & (first + c < n)
        x = tl.load(row + first + c, mask=mask, other=0.0) * scale
        x = tl.where(first + c == j, x + bend, x)
        tl.store(row + first + c, x / 2, mask=mask)


@triton.jit
def _reflect(by, of, matrix, j, top, r, n, gain, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Reflects rows from ``top`` on by row ``j``."""
    row = by + matrix + j * (n + tl.full((), 0, tl.int64))
    products = tl.zeros((HEIGHT,), tl.float64)
    for first in range(0, n, WIDTH):
        i, c, at, mask = _columns(matrix, r, n, first, HEIGHT, WIDTH)
        v = tl.load(row + c, mask=(c >= j) & (c < n), other=0.0)
        products += _inner(v, tl.load(of + at, mask=mask & (c >= j) & (i >= top), other=0.0))
    for first in range(0, n, WIDTH):
        i, c, at, mask = _columns(matrix, r, n, first, HEIGHT, WIDTH)
        v = tl.load(row + c, mask=(c >= j) & (c < n), other=0.0)
        own = mask & (c >= j) & (i >= top)
        t = tl.load(of + at, mask=own, other=0.0)
        tl.store(of + at, t - (gain * products)[:, None] * v, mask=own)
    tl.debug_barrier()
