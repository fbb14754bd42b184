"""Means over senders: the compiled kernel against plain torch bit for bit."""

from __future__ import annotations

import pytest
import torch

from gradwire.errors import PayloadError
from gradwire.kernels import Compensated, cpu, reference
from kernel_inputs import BLOCKS, block_of, counts_of, covered, normal, same
from together import together


@together("name", BLOCKS)
@together("rows", [1, 3])
def test_scatter_mean_is_the_reference(name: str, rows: int) -> None:
    block = BLOCKS[name]
    counts = counts_of(block, 0.2)
    positions = torch.zeros(rows, int(counts.sum()), dtype=torch.int64)
    values = torch.zeros(positions.shape)
    for row in range(rows):
        cpu.topk_select(block, Compensated(normal(row)), counts, positions[row], values[row])
    out, other = normal(1), normal(1)
    cpu.scatter_mean(block, positions, values, out)
    reference.scatter_mean(block, positions, values, other)
    assert same(out, other)
    assert same(out[~covered(block)], normal(1)[~covered(block)])


def test_scatter_mean_counts_who_sent() -> None:
    block, out = block_of([8]), normal()
    cpu.scatter_mean(block, torch.tensor([[0, 1], [1, 3]]), torch.tensor([[2.0, 4.0], [8.0, -1.0]]), out)
    assert out[2:10].tolist() == [2.0, 6.0, 0.0, -1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("kernels", [cpu, reference])
def test_positions_outside_the_runs_change_nothing(kernels: object) -> None:
    out = normal()
    with pytest.raises(PayloadError):
        kernels.scatter_mean(block_of([5, 20]), torch.tensor([[0, 6]]), torch.ones(1, 2), out)
    assert torch.equal(out, normal())
