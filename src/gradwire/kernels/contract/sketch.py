"""Count sketches."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from gradwire.layout import Block, Int64Array


class Sketch(Protocol):
    """Count sketches."""

    def sketch(self, block: Block, values: Tensor, columns: Int64Array, rows: int, key: int, table: Tensor) -> None:
        """Count sketches, one a segment: ``table`` holds ``rows`` rows of ``columns[s]``, segment after segment."""
        ...

    def sketch_estimates(
        self, block: Block, table: Tensor, columns: Int64Array, rows: int, key: int, out: Tensor
    ) -> None:
        """Each element's median over the rows of its segment's sketch; ``rows`` is odd."""
        ...
