import math

import numpy as np
import pytest
import torch

from codec_checks import check_compiled_once
from gradwire.errors import PayloadError
from gradwire.kernels import Compensated, cpu, reference
from gradwire.layout import Block
from gradwire.randomness import key_of
from kernel_inputs import BUFFER, KEY, block_of, blocks, counts_of, covered, normal, same
from together import together


@blocks
@together("share", [0.0, 0.01, 0.3, 1.0])
def test_randomk_is_the_reference(block: Block, share: float) -> None:
    counts = counts_of(block, share)
    positions = torch.zeros(2, int(counts.sum()), dtype=torch.int64)
    cpu.randomk_positions(block, counts, positions[0], KEY)
    reference.randomk_positions(block, counts, positions[1], KEY)
    assert same(*positions)
    assert positions[0].unique().numel() == positions.shape[1]
    values = torch.zeros(2, positions.shape[1])
    cpu.gather(block, normal(), positions[0], values[0])
    reference.gather(block, normal(), positions[0], values[1])
    assert same(*values)


def test_randomk_positions_are_uniform() -> None:
    """Chi-square of how often each element is chosen, and each is first, within 5 standard deviations."""
    draws, count = 3000, 4
    for numel in (11, 16, 37):
        block = block_of([numel])
        chosen = np.zeros((2, numel))
        positions = torch.zeros(count, dtype=torch.int64)
        for draw in range(draws):
            cpu.randomk_positions(block, np.array([count]), positions, key_of(1, draw))
            chosen[0, positions.numpy()] += 1
            chosen[1, positions[0]] += 1
        for row, total in zip(chosen, (draws * count, draws), strict=True):
            chi_square = ((row - total / numel) ** 2 / (total / numel)).sum()
            assert chi_square <= numel - 1 + 5 * math.sqrt(2 * (numel - 1))


@blocks
@together("ascending", [True, False])
@together("rows", [1, 3])
def test_scatter_sum_is_the_reference(block: Block, ascending: bool, rows: int) -> None:
    counts = counts_of(block, 0.2)
    positions = torch.zeros(rows, int(counts.sum()), dtype=torch.int64)
    values = torch.zeros(positions.shape)
    for row in range(rows):
        if ascending:
            cpu.topk_select(block, Compensated(normal(row)), counts, positions[row], values[row])
        else:
            cpu.randomk_positions(block, counts, positions[row], row)
            cpu.gather(block, normal(), positions[row], values[row])
    out, other = normal(1), normal(1)
    cpu.scatter_sum(block, positions, values, out, 1 / 3)
    reference.scatter_sum(block, positions, values, other, 1 / 3)
    assert same(out, other)
    assert same(out[~covered(block)], normal(1)[~covered(block)])


def test_values_that_are_not_finite_count_as_not_sent() -> None:
    block, residual = block_of([8]), torch.ones(BUFFER)
    cpu.subtract(block, residual, torch.tensor([0, 1, 2]), torch.tensor([math.nan, math.inf, 0.25]))
    assert residual[2:6].tolist() == [1.0, 1.0, 0.75, 1.0]


@together("kernels", [cpu, reference])
@together("block", [block_of([5, 20]), block_of([])], ["gaps", "empty"])
@together("bad", [-1, 5, 7, 28, 31, 32, 2**40, -(2**63)])
def test_positions_outside_the_runs_change_nothing(kernels: object, block: Block, bad: int) -> None:
    out = normal()
    positions = torch.tensor([[0, 9, bad]])
    values = torch.ones(1, 3)
    with pytest.raises(PayloadError):
        kernels.scatter_sum(block, positions, values, out, 1.0)
    with pytest.raises(PayloadError):
        kernels.subtract(block, out, positions[0], values[0])
    with pytest.raises(PayloadError):
        kernels.gather(block, out, positions[0], values[0])
    assert torch.equal(out, normal())


def test_compiled_once() -> None:
    check_compiled_once("sparse")
