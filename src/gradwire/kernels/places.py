"""Where the rows of several matrices lie, and in other buffers what belongs to them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from gradwire.layout import Int64Array

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
