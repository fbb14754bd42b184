"""The matrices of a block, grouped by shape, and their factors.

Factors are kept as rows: a matrix ``M (n, m)`` of rank ``r`` is ``P^T Q`` with ``P (r, n)`` and ``Q (r, m)``. With long
rows, products with thin factors run near the speed of memory, where long columns would not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.errors import ConfigurationError
from gradwire.exact import magnitudes, power_above
from gradwire.layout import Block, Granularity, Slot
from gradwire.memory import Kind, Store
from gradwire.randomness import gaussian, mix64

_DTYPES = {32: torch.float32, 16: torch.bfloat16}


@dataclass(frozen=True, eq=False)
class Matrices:
    """All matrices of one shape in a flat buffer.

    Attributes:
        slots: Where each lies.
        n: Rows, the parameter's first dimension.
        m: Columns, all its other dimensions.
    """

    slots: tuple[Slot, ...]
    n: int
    m: int

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Each matrix as a block of its own."""
        return tuple(Block.cut([slot], Granularity("layer")) for slot in self.slots)

    def rank(self, limit: int) -> int:
        """The matrix rank to use: ``limit``, or less where a side is shorter."""
        return min(limit, self.n, self.m)

    def factor(self, store: Store, field: str, rank: int, length: int, seed: int) -> Tensor:
        """A factor of each matrix, ``float32[k, rank, length]``, kept by parameter name; :meth:`start` at first."""
        first = partial(_start, field, rank, length, seed)
        return store.stacked(field, [slot.name for slot in self.slots], first, Kind.SHARED)

    def start(self, store: Store, field: str, rank: int, length: int, seed: int) -> Tensor:
        """What a factor is at first: Gaussian, drawn from ``seed`` and names alone, so it is the same on all ranks."""
        return torch.stack([_start(field, rank, length, seed, slot.name) for slot in self.slots]).to(store.device)


def _start(field: str, rank: int, length: int, seed: int, name: str) -> Tensor:
    slot = Slot(f"{field} of {name}", (rank, length), 0)
    return gaussian(mix64(slot.stream ^ seed), slot.numel).view(slot.shape)


Factors = list[Tensor]
"""One of each matrix, ``float32[k, r, n]`` or ``[k, r, m]`` for each group of ``k`` of one shape."""


def empty(shapes: Sequence[tuple[int, int, int]], device: torch.device) -> Factors:
    """Room for factors, one after another."""
    return apart(torch.empty(sum(map(math.prod, shapes)), dtype=torch.float32, device=device), shapes)


def apart(flat: Tensor, shapes: Sequence[tuple[int, int, int]]) -> Factors:
    """Factors that lie one after another."""
    parts = torch.split(flat, [math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def group(block: Block) -> list[Matrices]:
    """The matrices of a block, one group for each shape, in order of first appearance."""
    by_shape: dict[tuple[int, int], list[Slot]] = {}
    for slot in block.slots:
        by_shape.setdefault(as_rows(slot.shape), []).append(slot)
    return [Matrices(tuple(slots), n, m) for (n, m), slots in by_shape.items()]


def gains(shape: tuple[int, ...], rank: int) -> bool:
    """Whether factors of this rank are smaller than a tensor of this shape."""
    n, m = as_rows(shape)
    return min(rank, n, m) * (n + m) < n * m


def project_rows(
    groups: Sequence[Matrices], source: kernels.Compensated, q: Factors, subtract: Factors | None = None
) -> Factors:
    """``P = M Q`` of all matrices, which are left in the residual, or what ``P subtract^T`` leaves of them."""
    p = empty([(len(each), each.shape[1], matrices.n) for matrices, each in zip(groups, q, strict=True)], q[0].device)
    _project(groups, kernels.project_rows, "project_rows_each", source, q, p, subtract)
    return p


def project_columns(
    groups: Sequence[Matrices], source: kernels.Compensated, p: Factors, subtract: Factors | None = None
) -> Factors:
    """``Q = M^T P``, and ``subtract Q^T`` is subtracted; otherwise as :func:`project_rows`."""
    q = empty([(len(each), each.shape[1], matrices.m) for matrices, each in zip(groups, p, strict=True)], p[0].device)
    _project(groups, kernels.project_columns, "project_columns_each", source, p, q, subtract)
    return q


def _project(
    groups: Sequence[Matrices],
    one: Callable[..., Any],
    all_of_them: str,
    source: kernels.Compensated,
    fixed: Factors,
    computed: Factors,
    subtract: Factors | None,
) -> None:
    if at_once := kernels.at_once(all_of_them, source.gradient.device):
        at_once(blocks(groups), source, fixed, computed, subtract)
        return
    taken = fixed if subtract is None else subtract
    for matrices, *factors in zip(groups, fixed, computed, taken, strict=True):
        for block, given, found, back in zip(matrices.blocks, *factors, strict=True):
            one(block, source, given, found, subtract=None if subtract is None else back)


def write_products(groups: Sequence[Matrices], p: Factors, q: Factors, out: Tensor, residual: Tensor | None) -> None:
    """``out = P Q^T`` of all matrices, taken from the residual if one is given."""
    if at_once := kernels.at_once("write_products", out.device):
        at_once(blocks(groups), p, q, out, residual)
        return
    for matrices, *factors in zip(groups, p, q, strict=True):
        for block, p_rows, q_rows in zip(matrices.blocks, *factors, strict=True):
            kernels.write_product(block, p_rows, q_rows, out, residual)


def remember(kept: Factors, found: Factors) -> Factors:
    """Keeps factors that are finite; returns them, as NaN where they are not."""
    if at_once := kernels.at_once("remember_factors", kept[0].device):
        return list(at_once(kept, found))
    marked = []
    for mine, new in zip(kept, found, strict=True):
        finite = new.isfinite().all(2, keepdim=True).all(1, keepdim=True)
        mine.copy_(torch.where(finite, new, mine))
        marked.append(torch.where(finite, new, torch.nan))
    return marked


def renewed(factors: Factors, starts: Factors) -> Factors:
    """Factors, and in place of rows that are zero those from which they started.

    A matrix that is zero leaves such rows, and so does one that has nothing in the directions that were known. They
    point nowhere, and from then on nothing would be sent of a matrix whose first rows stay zero.
    """
    return [torch.where(rows.any(2, keepdim=True), rows, start) for rows, start in zip(factors, starts, strict=True)]


def filled(factors: Factors, starts: Factors) -> Factors:
    """Factors, and in place of each zero what was there when they started.

    A column that a matrix had nothing in leaves a zero. Values that come to it later, in rows that were zero as well,
    are nothing to the directions that are known, however much of them is owed. Where there is nothing still, what a
    zero is replaced by counts for nothing.
    """
    return [torch.where(rows == 0, start, rows) for rows, start in zip(factors, starts, strict=True)]


def blocks(groups: Sequence[Matrices]) -> tuple[Block, ...]:
    """All matrices."""
    return tuple(block for matrices in groups for block in matrices.blocks)


def check_rank(rank: int, bits: int = 32) -> None:
    """Raises ConfigurationError unless ``rank`` is a matrix rank, and factors can have so many bits a value."""
    if bits not in _DTYPES:
        raise ConfigurationError(f"bits={bits!r} is out of range; choose 32, or 16 for bfloat16")
    if not (isinstance(rank, int) and rank >= 1):
        raise ConfigurationError(f"rank={rank!r} is out of range; choose a whole number >= 1, usually 1 to 32")


def written(factor: Tensor, bits: int) -> Tensor:
    """A factor as it is sent."""
    return factor.to(_DTYPES[bits])


def scaled_rows(rows: Tensor) -> Tensor:
    """Each of ``rows``, ``[k, r, n]``, divided by the power of two above its sum of magnitudes.

    So products with it are no larger than the values multiplied, and however large or small it was, its direction is
    all that counts. Nothing is rounded but what becomes denormal.
    """
    return (rows / power_above(magnitudes(rows))).to(rows.dtype)


def room(length: int) -> float:
    """The power of two, at least the root of a length, that rows of that length which are 1 long are divided by.

    Then their magnitudes add up to 1 at most, and products with them are no larger than the values multiplied, however
    large: none is beyond float32.
    """
    return float(1 << ((length - 1).bit_length() + 1) // 2)


def scaled(factors: Factors) -> Factors:
    """The rows of all factors, as :func:`scaled_rows`."""
    if at_once := kernels.at_once("scale_each", factors[0].device):
        return list(at_once(factors))
    return [scaled_rows(rows) for rows in factors]


def refilled(factors: Factors, starts: Factors) -> Factors:
    """The rows of all factors, scaled, :func:`filled` by starts that are scaled, and scaled again."""
    if at_once := kernels.at_once("refill_each", factors[0].device):
        return list(at_once(factors, starts))
    return scaled(filled(scaled(factors), starts))


def orthonormal(factors: Factors) -> Factors:
    """Orthonormal rows that span at least what those of factors, ``[k, r, n]``, do."""
    if at_once := kernels.at_once("orthonormalise_each", factors[0].device):
        return list(at_once(factors))
    bases = [rows.clone() for rows in factors]
    for basis in bases:
        kernels.orthonormalise(basis)
    return bases


def as_rows(shape: tuple[int, ...]) -> tuple[int, int]:
    """A parameter's first dimension, and all others together."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)
