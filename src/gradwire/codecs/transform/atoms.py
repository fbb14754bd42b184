"""A matrix as a few of its singular triples, drawn at random so that it is right on average."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.codec import Codec
from gradwire.codecs.lowrank import check_rank
from gradwire.layout import Block, Granularity, Slot
from gradwire.memory import Feedback, Remainder
from gradwire.randomness import hash32, run_keys

LARGEST = 2.0**110
"""Of larger values one vector of an atom might overflow; then it is shorter by ``SHIFT``, and the other one longer."""

SHIFT = 2.0**20

WHOLE = Granularity("layer")

NEGLIGIBLE = 2.0**-60
"""Smaller values, relative to the largest, are left out of a Gram matrix, of which they change no bit that counts:
squares that are denormal numbers keep its eigendecomposition from converging."""


@dataclass(frozen=True)
class Atoms(Codec):
    """``rank`` atoms of each matrix, an atom of probability p divided by p.

    With any orthonormal ``v_i`` a matrix is the sum of the atoms ``(M v_i) v_i^T``, so the ``v_i`` are taken from the
    Gram matrix of its shorter side, which is cheaper than its singular values and as exact.

    Attributes:
        rank: Atoms drawn of each matrix, or all that a shorter side has.
    """

    rank: int

    def __post_init__(self) -> None:
        check_rank(self.rank)

    def remainder(self, most: int) -> Remainder:
        """An atom of a small chance is sent many times as large as it is."""
        return "grows"

    def payload_bytes(self, block: Block) -> int:
        """Two vectors an atom."""
        return sum(4 * rank * (n + m) for _, rank, n, m in self._matrices(block))

    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, payload: Tensor, key: int) -> None:
        """Draws atoms of each matrix; NaN where they might be beyond float32, and for all if a value is not finite."""
        values, finite = feedback.compensate(block, gradient)
        numbers = payload.view(torch.float32)
        if not finite:
            numbers.fill_(torch.nan)
            return
        written = 0
        for (slot, rank, n, m), stream in zip(self._matrices(block), run_keys(key, block.streams), strict=True):
            matrix = values[slot.offset : slot.stop].view(n, m)
            left, right = _vectors(numbers, written, rank, n, m)
            uniform = (float(hash32(int(stream), torch.zeros((), dtype=torch.int64))) + 0.5) / 2**32
            _draw(matrix, uniform, left, right)
            if feedback.residual is not None and not left.isnan().any():
                feedback.residual[slot.offset : slot.stop].view(n, m).addmm_(left.T, right, alpha=-1)
            written += rank * (n + m)

    def decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """Adds up the atoms of all payloads in one product."""
        self.check(block, payloads)
        numbers = payloads.contiguous().view(torch.float32)
        written = 0
        for slot, rank, n, m in self._matrices(block):
            pairs = [_vectors(row, written, rank, n, m) for row in numbers]
            left, right = (torch.cat(side) for side in zip(*pairs, strict=True))
            kernels.write_product(Block.cut([slot], WHOLE), left * weight, right, out, residual=None)
            written += rank * (n + m)

    def _matrices(self, block: Block) -> list[tuple[Slot, int, int, int]]:
        """Each parameter, how many atoms are sent of it, its rows and its columns."""
        matrices = []
        for slot in block.slots:
            n = slot.shape[0] if slot.shape else 1
            m = slot.numel // n
            matrices.append((slot, min(self.rank, n, m), n, m))
        return matrices


def probabilities(sizes: Tensor, budget: int) -> Tensor:
    """Chances of atoms of these sizes, descending, that add up to ``budget`` and make the variance least.

    A chance is proportional to the size; what would exceed 1 becomes 1, and the others share what is left. Fewer sizes
    that are not zero than the budget have chance 1 each.
    """
    chances = torch.zeros_like(sizes)
    tails = sizes.flip(0).cumsum(0).flip(0).tolist()
    for certain, (size, tail) in enumerate(zip(sizes.tolist(), tails, strict=True)):
        left = budget - certain
        if left <= 0 or tail <= 0:
            break
        if left * size <= tail:
            chances[certain:] = sizes[certain:] * (left / tail)
            break
        chances[certain] = 1
    return chances


def systematic(chances: Tensor, uniform: float) -> Tensor:
    """Indices drawn with these chances, always as many as the chances add up to.

    Points one apart, the first at ``uniform``, are laid over the chances put end to end.
    """
    edges = chances.cumsum(0)
    count = round(float(edges[-1]))
    points = torch.arange(count, dtype=chances.dtype, device=chances.device) + uniform
    return torch.searchsorted(edges, points, right=True).clamp_(max=max(int((chances > 0).sum()) - 1, 0))


def _draw(matrix: Tensor, uniform: float, left: Tensor, right: Tensor) -> None:
    """Writes the vectors of drawn atoms as rows; rows that no atom takes are zero."""
    left.zero_()
    right.zero_()
    scale = float(matrix.abs().max())
    if scale == 0:
        return
    wide = matrix.shape[0] < matrix.shape[1]
    tall = (matrix.T if wide else matrix) / scale
    even = torch.where(tall.abs() < NEGLIGIBLE, 0.0, tall)
    squares, vectors = torch.linalg.eigh(even.T @ even)
    sizes = squares.double().clamp(min=0).sqrt().flip(0)
    chances = probabilities(sizes, len(left))
    drawn = systematic(chances, uniform)
    basis = vectors.flip(1).T[drawn]
    others, lengths = basis @ tall.T, scale / chances[drawn]
    if (others.abs().amax(1) * basis.abs().amax(1) * lengths).sum() > torch.finfo(torch.float32).max:
        left.fill_(torch.nan)
        return
    shift = SHIFT if scale > LARGEST else 1.0
    along, across = (right, left) if wide else (left, right)
    across[: len(drawn)] = basis * shift
    along[: len(drawn)] = others * (lengths / shift)[:, None]


def _vectors(numbers: Tensor, first: int, rank: int, n: int, m: int) -> tuple[Tensor, Tensor]:
    """The rows of ``n`` and of ``m`` in a payload."""
    middle, last = first + rank * n, first + rank * (n + m)
    return numbers[first:middle].view(rank, n), numbers[middle:last].view(rank, m)


def variance_bound(numel: int, rank: int) -> float:
    """Singular values all alike are the worst there is: ``min(n, m) / rank - 1`` for a square matrix."""
    return max(0.0, math.sqrt(numel) / rank - 1)
