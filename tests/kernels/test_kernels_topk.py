import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from codec_checks import cases, check_compiled_once
from gradwire.kernels import Compensated, cpu, reference
from gradwire.layout import Block, Granularity, Slot
from kernel_inputs import BLOCKS, BUFFER, blocks, counts_of, covered, gradients, memories, normal, residuals, same
from together import together


def check(block: Block, gradient: Tensor, memory: tuple[float, float] | None, share: float) -> None:
    left, right, beta, gamma = residuals(memory)
    counts = counts_of(block, share)
    positions, values = torch.zeros(2, int(counts.sum()), dtype=torch.int64), torch.zeros(2, int(counts.sum()))
    cpu.topk_select(block, Compensated(gradient, left, beta, gamma), counts, positions[0], values[0])
    reference.topk_select(block, Compensated(gradient, right, beta, gamma), counts, positions[1], values[1])
    assert same(*positions)
    assert same(*values)
    if left is not None:
        assert same(left, right)
        cpu.subtract(block, left, positions[0], values[0])
        reference.subtract(block, right, positions[1], values[1])
        assert same(left, right)


@blocks
@gradients
@memories
@together("share", [0.0, 0.01, 0.3, 1.0])
def test_topk_is_the_reference(
    block: Block, gradient: Tensor, memory: tuple[float, float] | None, share: float
) -> None:
    check(block, gradient, memory, share)


@pytest.mark.parametrize("kernels", [cpu, reference])
def test_topk_leaves_exactly_what_it_did_not_send(kernels: object) -> None:
    block, gradient, residual = BLOCKS["odd layers"], normal(), normal(1)
    t = 0.5 * residual + 2 * gradient
    counts = counts_of(block, 0.1)
    positions, values = torch.zeros(1, int(counts.sum()), dtype=torch.int64), torch.zeros(1, int(counts.sum()))
    kernels.topk_select(block, Compensated(gradient, residual, 0.5, 2.0), counts, positions[0], values[0])
    kernels.subtract(block, residual, positions[0], values[0])
    sent = torch.zeros(BUFFER)
    kernels.scatter_sum(block, positions, values, sent, 1.0)
    assert torch.equal((residual + sent)[covered(block)], t[covered(block)])


@together("numel", [1, 100, 4096, 4097, 100_001, 1_000_000])
@together("share", [0.001, 0.01, 0.5])
def test_topk_is_that_of_torch(numel: int, share: float) -> None:
    block = Block.cut([Slot("weight", (numel,), 0)], Granularity("layer"))
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    counts = counts_of(block, share)
    positions, values = torch.zeros(counts[0], dtype=torch.int64), torch.zeros(counts[0])
    cpu.topk_select(block, Compensated(gradient), counts, positions, values)
    assert torch.equal(values, gradient[positions])
    assert torch.equal(positions, positions.unique())
    expected = gradient.abs().topk(int(counts[0])).values
    assert torch.equal(values.abs().sort(descending=True).values, expected)


def test_topk_where_the_sample_misleads() -> None:
    numel, count = 200_000, 2000
    block = Block.cut([Slot("weight", (numel,), 0)], Granularity("layer"))
    for gradient in (
        torch.linspace(0, 1, numel),
        torch.cat((torch.randn(count // 2), torch.zeros(numel - count // 2))),
        torch.cat((torch.zeros(numel - count - 1), torch.randn(count + 1))),
        torch.ones(numel),
    ):
        positions, values = torch.zeros(2, count, dtype=torch.int64), torch.zeros(2, count)
        for index, kernels in enumerate((cpu, reference)):
            kernels.topk_select(block, Compensated(gradient), np.array([count]), positions[index], values[index])
        assert same(*positions)
        assert same(*values)


@settings(max_examples=60, deadline=None)
@given(case=cases(), share=st.floats(0, 1))
def test_any_values_are_the_reference(case: tuple, share: float) -> None:
    block, gradient, memory, _ = case
    check(block, gradient, memory, share)


def test_compiled_once() -> None:
    check_compiled_once("topk")
