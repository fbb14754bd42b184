"""Sums of many chunks have the order that the reference defines."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradwire.kernels.cpu._lanes import add_chunk, add_rest
from gradwire.kernels.cpu._source import total_magnitude
from gradwire.kernels.reference._torch import CHUNK, LANES, segment_total


@pytest.mark.parametrize("chunks", [1, 2, 17, LANES, LANES + 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3])
def test_chunks_are_added_up_in_lanes(chunks: int) -> None:
    totals = torch.randn(chunks, dtype=torch.float64, generator=torch.Generator().manual_seed(chunks)) * 1e3
    runs = [torch.nn.functional.pad(each, (0, 4)) for each in totals.split(1)]  # a chunk of one value each
    total, lanes = 0.0, np.full(LANES, np.nan)
    for chunk, of_chunk in enumerate(totals.tolist()):
        total = add_chunk(total, chunk, of_chunk, lanes)
    assert add_rest(total, chunks, lanes) == segment_total(runs)


def test_a_run_of_many_chunks() -> None:
    values = torch.randn(70 * CHUNK + 33, generator=torch.Generator().manual_seed(1)) * 1e3
    assert total_magnitude(values.numpy(), np.empty((2, LANES))) == segment_total([values.double().abs()])
