"""Where the rows of several matrices and their factors lie, and in other buffers what belongs to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from gradwire.layout import Block, Int64Array

FIELDS = 8


@dataclass(frozen=True, eq=False)
class Places:
    """Rows of matrices, each as long as others of its matrix, with their coordinates in a few directions.

    Attributes:
        table: ``int64[M, 8]``: first element of the rows, how many they are, how long, in how many directions, their
            first coordinate, how far apart those in two directions are, the first element of the directions, and 0.
    """

    table: Int64Array

    @classmethod
    def of(cls, rows: Iterable[tuple[int, ...]]) -> Places:
        """By what the table says of each, but the last."""
        return cls(np.array([(*each, 0) for each in rows], np.int64).reshape(-1, FIELDS))

    @classmethod
    def alone(cls, block: Block, p: Tensor, q: Tensor) -> Places:
        """Of one matrix, ``p.T @ q``, which has buffers of its own for all that belongs to it."""
        kept, (rank, n), m = _alone.setdefault(block, {}), p.shape, q.shape[1]
        if (rank, n, m) not in kept:
            kept[rank, n, m] = cls.of([(int(block.runs[0, 0]), n, m, rank, 0, n, 0)])
        return kept[rank, n, m]

    @cached_property
    def longest(self) -> int:
        """Elements of the longest row."""
        return int(self.table[:, 2].max(initial=0))


_alone: WeakKeyDictionary[Block, dict[tuple[int, ...], Places]] = WeakKeyDictionary()


def joined(factors: Sequence[Tensor]) -> Tensor:
    """The values of all, one after another: where they lie if they lie so in memory, else copies."""
    if not lie_together(factors):
        return torch.cat([factor.reshape(-1) for factor in factors])
    return factors[0].as_strided((sum(factor.numel() for factor in factors),), (1,))


def lie_together(factors: Sequence[Tensor]) -> bool:
    """Whether they follow one another in memory without a gap."""
    first, *_ = factors
    stop = first.data_ptr()
    for factor in factors:
        if factor.data_ptr() != stop or not factor.is_contiguous():
            return False
        stop += factor.nbytes
    length, before = stop - first.data_ptr(), first.storage_offset() * first.element_size()
    return before + length <= first.untyped_storage().nbytes()  # others' memory may begin where its own ends
