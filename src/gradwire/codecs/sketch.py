"""The count sketch: every value is added, with a random sign, to one random column of each of a few rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.errors import ConfigurationError
from gradwire.kernels.reference.sketch import LINE, MOST_ROWS
from gradwire.layout import Block, Int64Array
from gradwire.plain import Plain


@dataclass(frozen=True)
class CountSketch(Plain):
    """One table a segment (Charikar et al. 2002), linear in the values, so that tables average.

    The table of a segment estimates each value ``v`` within about ``|segment| / sqrt(columns)``; the median over rows
    makes a bad estimate as unlikely as more than half of its rows being bad.

    Attributes:
        rows: Rows of a table, odd, from 1 to 9.
        columns: Columns of a table for each coordinate that is to be found.
    """

    rows: int = 5
    columns: float = 4.0

    def __post_init__(self) -> None:
        if not (isinstance(self.rows, int) and 1 <= self.rows <= MOST_ROWS and self.rows % 2):
            raise ConfigurationError(f"rows={self.rows!r} is not possible; choose 1, 3, 5, 7 or 9, usually 5")
        if not 0 < self.columns < np.inf:
            raise ConfigurationError(
                f"columns={self.columns!r} is out of range; choose a positive multiple of k, usually 4"
            )

    def widths(self, counts: Int64Array) -> Int64Array:
        """Columns of each segment's table, at least ``LINE``."""
        widths: Int64Array = np.maximum(LINE, np.ceil(self.columns * counts)).astype(np.int64)
        return widths

    def write(self, block: Block, values: Tensor, counts: Int64Array, key: int) -> Tensor:
        """The tables of a block, one after another; of finite values they are finite."""
        widths = self.widths(counts)
        table = torch.empty(self.rows * int(widths.sum()), dtype=torch.float32, device=values.device)
        kernels.sketch(block, values, widths, self.rows, key, table)
        return table.nan_to_num_(0.0)  # sums of huge values overflow

    def estimate(self, block: Block, table: Tensor, counts: Int64Array, key: int, out: Tensor) -> None:
        """Writes what the tables say of each value to the block's elements of ``out``."""
        widths = self.widths(counts)
        kernels.sketch_estimates(block, table, widths, self.rows, key, out)
