"""Orthonormal rows, a program a matrix: inner products are exact sums, so its bits are those of any other order.

Row by row, all reflections that a row needs: while it is reflected by one, its product with the next one is summed up.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire import exact
from gradwire.deferred import shared
from gradwire.kernels.gpu._jitted import INFINITE, INFINITY, magnitude_bits
from gradwire.kernels.gpu._launch import launch
from gradwire.kernels.places import joined

WIDEST = 4096
"""Values of a row that a program holds at once, at most."""

_TO_GRID = tl.constexpr(exact.TO_GRID)
_HALF_GRID = tl.constexpr(exact.HALF_GRID)
_MEASURED_ONCE = tl.constexpr(exact.MEASURED_ONCE)
_NEWTON_STEPS = tl.constexpr(exact.NEWTON_STEPS)


def orthonormalise(rows: Tensor) -> None:
    rows.copy_(orthonormalise_each([rows])[0])


def orthonormalise_each(factors: Sequence[Tensor]) -> list[Tensor]:
    """What becomes of the rows of all matrices, ``float32[k, r, n]`` of each shape, in one launch."""
    shapes = tuple(tuple(rows.shape) for rows in factors)
    flat, (matrices, _) = torch.cat([rows.reshape(-1) for rows in factors]), _tables(shapes, factors[0].device)
    left = flat.new_empty(sum(k * (r + 1) * n for k, r, n in shapes), dtype=torch.float64)
    height = triton.next_power_of_2(max(r for _, r, _ in shapes))
    width = min(max(triton.next_power_of_2(max(n for _, _, n in shapes)), 256), WIDEST)
    launch(_orthonormalise, len(matrices), flat, left, matrices, HEIGHT=height, WIDTH=width, warps=8)
    return _apart(flat, factors)


def scale_each(factors: Sequence[Tensor]) -> list[Tensor]:
    """The rows of all matrices, each divided by the power of two above its sum of magnitudes, in one launch."""
    shapes = tuple(tuple(rows.shape) for rows in factors)
    flat, (_, rows) = torch.cat([rows.reshape(-1) for rows in factors]), _tables(shapes, factors[0].device)
    launch(_scale, len(rows), flat, rows, WIDTH=1024)
    return _apart(flat, factors)


def refill_each(factors: Sequence[Tensor], starts: Sequence[Tensor]) -> list[Tensor]:
    """The same, each zero is what a start has there, and the same once more, in one launch."""
    shapes = tuple(tuple(rows.shape) for rows in factors)
    flat = torch.cat([rows.reshape(-1) for rows in factors])
    _, rows = _tables(shapes, flat.device)
    launch(_refill, len(rows), flat, joined(starts), rows, WIDTH=1024)
    return _apart(flat, factors)


def _apart(flat: Tensor, factors: Sequence[Tensor]) -> list[Tensor]:
    parts = torch.split(flat, [rows.numel() for rows in factors])
    return [part.view(rows.shape) for part, rows in zip(parts, factors, strict=True)]


@cache
def _tables(shapes: tuple[tuple[int, ...], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Where matrices lie, one after another, and their rows.

    Returns:
        ``int64[M, 4]``: first element of a matrix, the same where there is a row more, rows, and values of a row; and
        ``int64[R, 2]``: first element of a row, and its values.
    """
    _, r, n = (np.repeat(side, [k for k, _, _ in shapes]) for side in np.array(shapes, np.int64).T)
    first, more = (np.cumsum(size) - size for size in (r * n, (r + 1) * n))
    number = np.arange(r.sum()) - np.repeat(np.cumsum(r) - r, r)
    rows = np.stack((np.repeat(first, r) + number * np.repeat(n, r), np.repeat(n, r)), axis=1)
    return shared(np.stack((first, more, r, n), axis=1), device), shared(rows, device)


@triton.jit
def _inner(a, b):
    """The sum of products, each rounded to the grid, where any order gives the same."""
    return tl.sum(a * b + _TO_GRID - _TO_GRID, axis=0, keep_dims=True)


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
def _size(values):
    """The exponent of the root of how many values there are, or one more."""
    return (_exponent(values) + 1) >> 1


@triton.jit
def _measures(values):
    """How often a length is measured of so many values."""
    return tl.where(tl.max(values, axis=0) < _MEASURED_ONCE, 1, 2)


@triton.jit
def _to_half(square, values):
    """What brings a length to about 1/2 to 1 whose square was measured of so many values."""
    return _power(-((_exponent(square + values * _HALF_GRID) + 1) >> 1))


@triton.jit
def _orthonormalise(rows, left, matrices, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """As the reference; a row is divided by powers of two only, so that it may be multiplied by all of them at once."""
    matrix = matrices + 4 * tl.program_id(0)
    rows += tl.load(matrix)
    left += tl.load(matrix + 1)
    r = tl.load(matrix + 2).to(tl.int32)
    wide = tl.load(matrix + 3)
    n = wide.to(tl.int32)
    number = tl.arange(0, HEIGHT)
    gains = tl.zeros((HEIGHT,), tl.float64)
    peaks = tl.zeros((1,), tl.int32)
    for j in range(r):
        own = left + j * wide
        peak = _bring_to_one(rows + j * wide, own, n, WIDTH)
        peaks = tl.maximum(peaks, peak)
        product = _product(left, own, 0, n, WIDTH)
        for by in range(j):
            gain = tl.sum(tl.where(number == by, gains, 0.0), axis=0)
            product = _reflect(left + by * wide, own, by, left + (by + 1) * wide, by + 1, n, gain * product, WIDTH)
        gain, bend, scale = _reflection(own, j, n, WIDTH)
        gains = tl.where(number == j, gain, gains)
        _bend(own, j, n, bend, scale, WIDTH)
    own = left + r * wide
    for j in range(r):
        for first in range(0, n, WIDTH):
            c = first + tl.arange(0, WIDTH)
            tl.store(own + c, (c == j).to(tl.float64), mask=c < n)
        tl.debug_barrier()
        product = _product(left + j * wide, own, j, n, WIDTH)
        for back in range(j + 1):
            by = j - back
            after = tl.maximum(by - 1, 0)
            gain = tl.sum(tl.where(number == by, gains, 0.0), axis=0)
            product = _reflect(left + by * wide, own, by, left + after * wide, after, n, gain * product, WIDTH)
        for first in range(0, n, WIDTH):
            c = first + tl.arange(0, WIDTH)
            t = tl.load(own + c, mask=c < n, other=0.0).to(tl.float32)
            tl.store(rows + j * wide + c, tl.where(peaks < INFINITE, t, float("nan")), mask=c < n)
        tl.debug_barrier()


@triton.jit
def _scale(values, rows, WIDTH: tl.constexpr):
    first, n = _row_of(rows)
    _scale_row(values + first, n, WIDTH)


@triton.jit
def _refill(values, starts, rows, WIDTH: tl.constexpr):
    first, n = _row_of(rows)
    _scale_row(values + first, n, WIDTH)
    tl.debug_barrier()
    for begin in range(0, n, WIDTH):
        c = begin + tl.arange(0, WIDTH)
        empty = tl.load(values + first + c, mask=c < n, other=1.0) == 0
        tl.store(values + first + c, tl.load(starts + first + c, mask=empty, other=0.0), mask=empty)
    tl.debug_barrier()
    _scale_row(values + first, n, WIDTH)


@triton.jit
def _row_of(rows):
    """The first element of a program's row, and its values."""
    row = rows + 2 * tl.program_id(0)
    return tl.load(row), tl.load(row + 1).to(tl.int32)


@triton.jit
def _scale_row(row, n, WIDTH: tl.constexpr):
    """See ``scaled_rows`` of the codecs; a row that is not finite stays."""
    c = tl.arange(0, WIDTH)
    peak = tl.zeros((1,), tl.int32)
    for first in range(0, n, WIDTH):
        bits = magnitude_bits(tl.load(row + first + c, mask=first + c < n, other=0.0))
        peak = tl.maximum(peak, tl.max(bits, axis=0, keep_dims=True))
    finite = peak < INFINITE
    top = _exponent(tl.where(finite, peak, 0).to(tl.float32, bitcast=True).to(tl.float64))
    share = _exponent(tl.zeros((1,), tl.float64) + n)
    total = tl.zeros((1,), tl.float64)
    for first in range(0, n, WIDTH):
        t = tl.abs(tl.load(row + first + c, mask=first + c < n, other=0.0))
        t = tl.where(t < INFINITY, t, 0.0).to(tl.float64) * _power(-top) * _power(-share)
        total += tl.sum(t + _TO_GRID - _TO_GRID, axis=0, keep_dims=True)
    unit = _power(tl.where(finite & (total > 0), -(_exponent(total) + top + share), 0))
    for first in range(0, n, WIDTH):
        t = tl.load(row + first + c, mask=first + c < n, other=0.0).to(tl.float64) * unit
        tl.store(row + first + c, t.to(tl.float32), mask=first + c < n)


@triton.jit
def _bring_to_one(row, own, n, WIDTH: tl.constexpr):
    """Copies a row, times a power of two; the bits of its largest magnitude."""
    c = tl.arange(0, WIDTH)
    peak = tl.zeros((1,), tl.int32)
    for first in range(0, n, WIDTH):
        bits = magnitude_bits(tl.load(row + first + c, mask=first + c < n, other=0.0))
        peak = tl.maximum(peak, tl.max(bits, axis=0, keep_dims=True))
    size = tl.where(peak < INFINITE, peak, 0).to(tl.float32, bitcast=True).to(tl.float64)
    values = tl.zeros((1,), tl.float64) + n
    unit = _power(-(_exponent(size) + _size(values)))
    for _ in range(_measures(values)):
        square = tl.zeros((1,), tl.float64)
        for first in range(0, n, WIDTH):
            t = tl.load(row + first + c, mask=first + c < n, other=0.0)
            t = tl.where(tl.abs(t) < INFINITY, t, 0.0).to(tl.float64) * unit
            square += _inner(t, t)
        unit *= _to_half(square, values)
    for first in range(0, n, WIDTH):
        t = tl.load(row + first + c, mask=first + c < n, other=0.0)
        t = tl.where(tl.abs(t) < INFINITY, t, 0.0).to(tl.float64) * unit
        tl.store(own + first + c, t, mask=first + c < n)
    tl.debug_barrier()
    return peak


@triton.jit
def _product(by, row, j, n, WIDTH: tl.constexpr):
    """The inner product of rows from their element ``j`` on."""
    c = tl.arange(0, WIDTH)
    product = tl.zeros((1,), tl.float64)
    for first in range(0, n, WIDTH):
        mask = (first + c >= j) & (first + c < n)
        v = tl.load(by + first + c, mask=mask, other=0.0)
        product += _inner(v, tl.load(row + first + c, mask=mask, other=0.0))
    return product


@triton.jit
def _reflect(by, row, j, after, following, n, share, WIDTH: tl.constexpr):
    """Takes a share of a row, from its element ``j`` on, from another; its product with the one it is taken from next.

    That one begins with its element ``following``. Where nothing follows, the product is anything.
    """
    c = tl.arange(0, WIDTH)
    product = tl.zeros((1,), tl.float64)
    for first in range(0, n, WIDTH):
        mask = first + c < n
        v = tl.load(by + first + c, mask=mask & (first + c >= j), other=0.0)
        t = tl.load(row + first + c, mask=mask, other=0.0)
        t = tl.where(first + c >= j, t - share * v, t)
        w = tl.load(after + first + c, mask=mask & (first + c >= following), other=0.0)
        product += _inner(w, t)
        tl.store(row + first + c, t, mask=mask)
    tl.debug_barrier()
    return product


@triton.jit
def _square(row, j, n, scale, WIDTH: tl.constexpr):
    """That of the length of a scaled row from its element ``j`` on."""
    c = tl.arange(0, WIDTH)
    square = tl.zeros((1,), tl.float64)
    for first in range(0, n, WIDTH):
        mask = (first + c >= j) & (first + c < n)
        x = tl.load(row + first + c, mask=mask, other=0.0) * scale
        square += _inner(x, x)
    return square


@triton.jit
def _reflection(row, j, n, WIDTH: tl.constexpr):
    """Of a row from its element ``j`` on: the reflection's gain, what its first element is changed by, and its unit."""
    c = tl.arange(0, WIDTH)
    peak = tl.zeros((1,), tl.float64)
    for first in range(0, n, WIDTH):
        mask = (first + c >= j) & (first + c < n)
        x = tl.abs(tl.load(row + first + c, mask=mask, other=0.0))
        peak = tl.maximum(peak, tl.max(x, axis=0, keep_dims=True))
    values = tl.zeros((1,), tl.float64) + (n - j)
    scale = _power(-(_exponent(peak) + _size(values)))
    for _ in range(_measures(values)):
        scale *= _to_half(_square(row, j, n, scale, WIDTH), values)
    square = _square(row, j, n, scale, WIDTH)
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
    tl.debug_barrier()
    for first in range(0, n, WIDTH):
        mask = (first + c >= j) & (first + c < n)
        x = tl.load(row + first + c, mask=mask, other=0.0) * scale
        x = tl.where(first + c == j, x + bend, x)
        tl.store(row + first + c, x / 2, mask=mask)
    tl.debug_barrier()
