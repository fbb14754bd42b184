"""Count sketches."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.reference._torch import flat_runs
from gradwire.layout import Block, Int64Array
from gradwire.randomness import hash32, mix64, run_keys

LINE = 16
"""Neighbours that lie side by side in every row of a sketch: they share a cache line, and never a column."""

MOST_ROWS = 9
"""Of a sketch; all have an odd number of rows."""


def sketch(block: Block, values: Tensor, columns: Int64Array, rows: int, key: int, table: Tensor) -> None:
    """Count sketches, one a segment: ``table`` holds ``rows`` rows of ``columns[s]``, segment after segment.

    A run is cut into lines of ``LINE`` elements. In every row of its segment's table a line has a first column and a
    sign for each element, hashed from the index of its first element; element ``i`` is added to column ``i`` after the
    first, around the end. Two elements of different lines so meet with the chance ``1 / columns``, as in any count
    sketch; those of one line never do, as a table has at least ``LINE`` columns.

    Lines are added in order, each row with ``LINE - 1`` columns more than it has, which are then added to its first.
    """
    written = 0
    for segment, width in enumerate(columns.tolist()):
        wide = torch.zeros(rows, width + LINE - 1, device=values.device, dtype=torch.float32)
        for row, start, stop, first, signs in _lines(block, segment, width, rows, key, values.device):
            wide[row, first : first + stop - start] += values[start:stop] * signs
        wide[:, : LINE - 1] += wide[:, width:]
        table[written : written + rows * width] = wide[:, :width].flatten()
        written += rows * width


def sketch_estimates(block: Block, table: Tensor, columns: Int64Array, rows: int, key: int, out: Tensor) -> None:
    """Each element's median over the rows of its segment's sketch; ``rows`` is odd.

    Rows are sorted by ``rows`` rounds of comparing neighbours, which swap if the first is larger.
    """
    written = 0
    for segment, width in enumerate(columns.tolist()):
        wide = table[written : written + rows * width].view(rows, width)
        wide = torch.cat((wide, wide[:, : LINE - 1]), dim=1)
        estimates: list[Tensor] = []
        for _, start, stop, first, signs in _lines(block, segment, width, rows, key, out.device):
            estimates.append(wide[len(estimates), first : first + stop - start] * signs)
            if len(estimates) == rows:
                out[start:stop] = _median(estimates)
                estimates = []
        written += rows * width


def _lines(
    block: Block, segment: int, width: int, rows: int, key: int, device: torch.device
) -> list[tuple[int, int, int, int, Tensor]]:
    """Row, first and one past the last element, first column, and signs: of each line for each row."""
    keys = run_keys(key, block.streams).tolist()
    lanes = torch.arange(LINE, device=device)
    lines = []
    for run, start, stop, _ in flat_runs(block, segment):
        for first in range(0, stop - start, LINE):
            counter = torch.tensor(int(block.origins[run]) + first, device=device)
            last = min(first + LINE, stop - start)
            for row in range(rows):
                column = int(hash32(mix64(keys[run] ^ (2 * row)), counter)) * width >> 32
                bits = hash32(mix64(keys[run] ^ (2 * row + 1)), counter) >> lanes[: last - first] & 1
                lines.append((row, start + first, start + last, column, 1.0 - 2.0 * bits.float()))
    return lines


def _median(estimates: list[Tensor]) -> Tensor:
    for number in range(len(estimates)):
        for i in range(number % 2, len(estimates) - 1, 2):
            low, high = estimates[i], estimates[i + 1]
            swap = low > high
            estimates[i], estimates[i + 1] = torch.where(swap, high, low), torch.where(swap, low, high)
    return estimates[len(estimates) // 2]
