"""Sums of many chunks have the order that the reference defines."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradwire.kernels.cpu._source import total_magnitude
from gradwire.kernels.cpu.statistics import _statistics
from gradwire.kernels.reference._torch import CHUNK, LANES, segment_total


@pytest.mark.parametrize("chunks", [1, 2, 17, LANES, LANES + 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3])
def test_chunks_are_added_up_in_lanes(chunks: int) -> None:
    totals = torch.randn(chunks, dtype=torch.float64, generator=torch.Generator().manual_seed(chunks)) * 1e3
    runs = [torch.nn.functional.pad(each, (0, 4)) for each in totals.split(1)]  # a chunk of one value each
    total, largest, lanes = np.empty(1), np.empty(1, np.float32), np.full(LANES, np.nan)
    maxima = np.zeros(chunks, np.uint32)
    _statistics(np.array([0, 1]), np.array([chunks]), totals.numpy(), maxima, lanes, total, largest)
    assert total.item() == segment_total(runs)


def test_a_run_of_many_chunks() -> None:
    values = torch.randn(70 * CHUNK + 33, generator=torch.Generator().manual_seed(1)) * 1e3
    assert total_magnitude(values.numpy(), np.empty((2, LANES))) == segment_total([values.double().abs()])
