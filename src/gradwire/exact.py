"""Sums that have the same bits in any order, and so on every kind of machine.

What all ranks compute from the same average must come out the same on all of them, and they need not be of one kind:
libraries of linear algebra add in an order that depends on the processor. Here terms are rounded to multiples of
``2**-50`` first. Sums of those are exact while they are below 8, so no order changes them; everything else is single
operations of IEEE 754, which every machine rounds alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

TO_GRID = 6.0
"""Added to a ``float64`` in [-2, 2) and taken off again, it leaves the nearest multiple of ``2**-50``."""

HALF_GRID = 2.0**-51
"""The most that a term of an exact sum is rounded by."""

MEASURED_ONCE = 1 << 20
"""Fewer terms than these are rounded by so little that a length need not be measured again."""

NEWTON_STEPS = 5
"""From 3/4 to a root of [1/2, 1): the error falls from 2**-2 to below 2**-5, 2**-11, 2**-23, 2**-47 and to rounding."""


def exact_sum(terms: Tensor) -> Tensor:
    """The sum of ``float64[..., n]`` over its last dimension, ``[..., 1]``; magnitudes must add up to 2 at most."""
    return (terms + TO_GRID - TO_GRID).sum(-1, keepdim=True)


def inner(first: Tensor, second: Tensor) -> Tensor:
    """Inner products of ``float64`` vectors along the last dimension, ``[..., 1]``; their lengths must be at most 1."""
    return exact_sum(first * second)


def power_above(sizes: Tensor) -> Tensor:
    """The power of two above each of some sizes, which are not negative; 1 for zero."""
    return torch.where(sizes > 0, sizes / torch.frexp(sizes).mantissa, 1.0)


def power_of_two(exponents: Tensor) -> Tensor:
    """``2.0**exponents`` as ``float64``, of its bits: on some devices powers are not rounded."""
    return (exponents.long() + 1023 << 52).view(torch.float64)


def halvings(n: int) -> float:
    """The power of two by which ``n`` numbers below 1 are multiplied so that they add up to less than 1."""
    return 2.0 ** -n.bit_length()


def magnitudes(rows: Tensor) -> Tensor:
    """Sums of the magnitudes of ``float32[..., n]``, as ``float64[..., 1]``."""
    wide = rows.double().abs()
    top = power_above(wide.amax(-1, keepdim=True))
    share = halvings(rows.shape[-1])
    return exact_sum(wide / top * share) / share * top


def brought_to_one(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """``float64[..., n]`` divided by the powers of two, ``[..., 1]``, that make their lengths about 1/2 to 1, below 1.

    Divided by the largest magnitude and by the root of ``n``, they are at most 1 long. The length of millions with one
    that is far larger than the others may then be lost in what their squares are rounded by: it is taken for as long as
    it may be, and measured again of vectors that are longer for it.
    """
    n = vectors.shape[-1]
    power = power_above(vectors.abs().amax(-1, keepdim=True)) * 2.0 ** (n.bit_length() + 1 >> 1)
    vectors = vectors / power
    for _ in range(1 if n < MEASURED_ONCE else 2):
        most = inner(vectors, vectors) + n * HALF_GRID
        rest = power_of_two((torch.frexp(most).exponent + 1) >> 1)
        vectors, power = vectors / rest, power * rest
    return vectors, power


def root(squares: Tensor) -> Tensor:
    """The square roots of 0 and of numbers of about 1/4 to 1, by Newton's iteration: libraries round theirs unlike."""
    roots = torch.full_like(squares, 0.75)
    for _ in range(NEWTON_STEPS):
        roots = (roots + squares / roots) / 2
    return torch.where(squares == 0, 0.0, roots)


def length(vectors: Tensor) -> Tensor:
    """Lengths of ``float32[..., n]``, as ``float64[..., 1]``."""
    near_one, power = brought_to_one(vectors.double())
    return root(inner(near_one, near_one)) * power
