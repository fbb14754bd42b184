"""Eight bits a value: a sign, and an entry of a table of magnitudes that is finer near zero."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels.code import Draws, Layout
from gradwire.kernels.reference._torch import SMALLEST_SCALE, largest

EXPONENTS = 7
"""Decades of the table: with ``n`` leading zeros before the flag, ``6 - n`` bits are left for the fraction."""


def magnitudes() -> Tensor:
    """The 128 magnitudes of a 7-bit code, ascending.

    Code 0 stands for 0. The other codes have ``n`` leading zeros, a flag bit, and ``6 - n`` bits that bisect (0.1, 1):
    they stand for the middle of what is left of it, times ``10**-n``.
    """
    table = [0.0]
    for bits in range(EXPONENTS):
        table += [10.0 ** (bits + 1 - EXPONENTS) * (0.1 + 0.9 * (part + 0.5) / 2**bits) for part in range(2**bits)]
    return torch.tensor(table, dtype=torch.float32)


def thresholds() -> Tensor:
    """The middle between each two neighbours of :func:`magnitudes`."""
    table = magnitudes().double()
    return ((table[1:] + table[:-1]) / 2).float()


CELL_BITS = 17
"""Low bits of a float32 within a cell. Cells are so narrow that at most one threshold lies in each."""


def cells() -> tuple[int, np.ndarray[Any, np.dtype[np.uint32]]]:
    """The table by which kernels find entries in one step: the first cell; for it and each following one, a number.

    With ``offset`` the low bits of a value in its cell, ``cells[cell] + offset >> CELL_BITS`` is the value's code: the
    sum carries into the code at the cell's threshold.
    """
    edges = thresholds().numpy().view(np.uint32)
    first = int(edges[0] >> CELL_BITS) - 1
    last = int(np.float32(1).view(np.uint32) >> CELL_BITS)
    starts = np.arange(first, last + 1, dtype=np.uint32) << np.uint32(CELL_BITS)
    codes = np.searchsorted(edges, starts).astype(np.uint32)
    table = codes << np.uint32(CELL_BITS)
    inside = edges[np.minimum(codes, edges.size - 1)] - starts
    split = (codes < edges.size) & (inside < 1 << CELL_BITS)
    table[split] += (1 << CELL_BITS) - 1 - inside[split]
    return first, table


class Dynamic(NamedTuple):
    """A sign and the nearest of 128 magnitudes, the dynamic tree of Dettmers 2016.

    Magnitudes are relative to the largest of a segment. They cover seven decades, the highest one in 64 steps. A value
    above a hundred-thousandth of the largest is off by less than half of itself; the largest one by 0.7 %.
    """

    def check(self) -> None:
        """Has no parameters."""

    @property
    def layout(self) -> Layout:
        """A byte a position and 4 bytes a segment."""
        return Layout(1, 8)

    def measure(self, values: list[Tensor]) -> Tensor | None:
        """The largest magnitude, 0 if too small to divide by."""
        peak = largest(values)
        return None if math.isnan(peak) else values[0].new_tensor([peak if peak >= SMALLEST_SCALE else 0.0])

    def put(self, t: Tensor, scale: Tensor, draws: Draws) -> Tensor:
        """The number of the nearest entry, and above it the sign."""
        inverse = 1 / scale if scale > 0 else torch.zeros_like(scale)
        return torch.bucketize(t.abs() * inverse, thresholds().to(t.device)) + 128 * (t < 0)

    def read(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Scaled table entries."""
        table = magnitudes().to(codes.device)
        return torch.cat((table, -table))[codes] * scales[:, 0]
