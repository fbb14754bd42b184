"""Compiled kernels of data-dependent counts against the reference, and what the reference says against plain torch."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire.errors import PayloadError
from gradwire.kernels import Compensated, cpu, reference
from gradwire.layout import Block
from kernel_inputs import BLOCKS, BUFFER, blocks, gradients, memories, normal, residuals, same
from together import together


def both_same(first: tuple[object, ...], second: tuple[object, ...]) -> bool:
    tensors = [[torch.as_tensor(each) for each in row] for row in (first, second)]
    return all(same(left, right) for left, right in zip(*tensors, strict=True))


@blocks
@gradients
@memories
def test_statistics_and_collections_are_the_reference(
    block: Block, gradient: Tensor, memory: tuple[float, float] | None
) -> None:
    left, right, beta, gamma = residuals(memory)
    found = cpu.magnitude_statistics(block, Compensated(gradient, left, beta, gamma))
    expected = reference.magnitude_statistics(block, Compensated(gradient, right, beta, gamma))
    assert both_same(found, expected)
    assert left is None or same(left, right)
    largest = found[1]
    source = gradient if left is None else left
    assert both_same(cpu.sign_counts(block, source), reference.sign_counts(block, source))
    for share in (0.0, 0.5, 1.0, math.inf):
        thresholds = np.full_like(largest, math.inf) if share == math.inf else np.float32(share) * largest
        thresholds[np.isnan(largest)] = np.nan
        assert both_same(cpu.exceedances(block, source, thresholds), reference.exceedances(block, source, thresholds))
        for room in (0, 100_000):
            found = cpu.collect_reaching(block, Compensated(source), thresholds, room)
            assert both_same(found, reference.collect_reaching(block, Compensated(source), thresholds, room))
            positions, values, counts = found
            assert (positions.diff() > 0).all()
            assert len(positions) == len(values) == counts[counts > 0].sum()
            assert (values != 0).all()
            assert np.array_equal(np.repeat(np.isnan(largest), np.diff(block.segments)), counts < 0)


@blocks
@gradients
@memories
@together("threshold", [1e-30, 1.0, math.inf])
def test_what_reaches_a_given_threshold_is_the_reference(
    block: Block, gradient: Tensor, memory: tuple[float, float] | None, threshold: float
) -> None:
    left, right, beta, gamma = residuals(memory)
    thresholds = np.full(block.segment_count, threshold, dtype=np.float32)
    thresholds[1::3] = np.nan
    found = cpu.collect_reaching(block, Compensated(gradient, left, beta, gamma), thresholds, 5)
    assert both_same(found, reference.collect_reaching(block, Compensated(gradient, right, beta, gamma), thresholds, 5))
    assert left is None or same(left, right)
    left, right, beta, gamma = residuals(memory)
    drawn = cpu.collect_drawn(block, Compensated(gradient, left, beta, gamma), thresholds, 5, 7)
    assert both_same(drawn, reference.collect_drawn(block, Compensated(gradient, right, beta, gamma), thresholds, 5, 7))
    assert left is None or same(left, right)
    assert np.array_equal(drawn[2] < 0, found[2] < 0)
    assert set(found[0].tolist()) <= set(drawn[0].tolist()) or threshold == math.inf


@blocks
@gradients
@memories
@together("given_squares", [False, True])
@together("threshold", [0.0, 0.7])
def test_unambiguous_is_the_reference(
    block: Block, gradient: Tensor, memory: tuple[float, float] | None, given_squares: bool, threshold: float
) -> None:
    left, right, beta, gamma = residuals(memory)
    moments = normal(7).square()
    twin = moments.clone()
    for _ in range(2):
        squares = gradient.square() * 0.3 if given_squares else None
        other = None if squares is None else squares.clone()
        options = (1.5, 0.999, threshold, 4)
        found = cpu.collect_unambiguous(block, Compensated(gradient, left, beta, gamma), squares, moments, *options)
        expected = reference.collect_unambiguous(
            block, Compensated(gradient, right, beta, gamma), other, twin, *options
        )
        assert both_same(found, expected)
        assert same(moments, twin)
        assert left is None or same(left, right)
        assert squares is None or same(squares, other)
    assert moments.isfinite().all()


@blocks
@gradients
@memories
@together("width", [1, 50, 500, 7000])
def test_local_maxima_are_the_reference(
    block: Block, gradient: Tensor, memory: tuple[float, float] | None, width: int
) -> None:
    left, right, beta, gamma = residuals(memory)
    bins = np.full(len(block.runs), width)
    found = cpu.collect_local_maxima(block, Compensated(gradient, left, beta, gamma), bins, 3)
    expected = reference.collect_local_maxima(block, Compensated(gradient, right, beta, gamma), bins, 3)
    assert both_same(found, expected)
    assert left is None or same(left, right)


@blocks
@together("filled", [[0, 0, 0], [0, 1, 3], [3, 0, 2]])
@together("ascending", [True, False])
def test_rows_of_different_lengths_add_up(block: Block, filled: list[int], ascending: bool) -> None:
    elements = np.concatenate([np.arange(start, start + length) for _, length, start in block.runs] or [np.zeros(0)])
    count = min(3, len(elements))
    positions = torch.from_numpy(np.tile(elements[:count], (3, 1)).astype(np.int64)).contiguous()
    positions = positions if ascending else positions.flip(1)
    values = normal(3)[: 3 * count].view(3, count).contiguous()
    counts = np.minimum(np.array(filled), count)
    outs = normal(1), normal(1), normal(1)
    cpu.scatter_sum(block, positions, values, outs[0], 0.5, counts)
    reference.scatter_sum(block, positions, values, outs[1], 0.5, counts)
    padded = values * (torch.arange(count) < torch.from_numpy(counts)[:, None])
    reference.scatter_sum(block, positions, padded, outs[2], 0.5)
    assert same(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    for kernels, target in ((cpu, outs[0]), (reference, outs[1])):
        kernels.scatter(block, target, positions[0], values[0])
    assert same(outs[0], outs[1])


@pytest.mark.parametrize("kernels", [cpu, reference])
def test_what_lies_beyond_a_row_is_not_looked_at(kernels: object) -> None:
    block, out = BLOCKS["one element"], torch.zeros(BUFFER)
    positions = torch.tensor([[0, -5], [0, 2**60]])
    kernels.scatter_sum(block, positions, torch.ones(2, 2), out, 1.0, np.array([1, 1]))
    assert out.sum() == 2
    with pytest.raises(PayloadError):
        kernels.scatter_sum(block, positions, torch.ones(2, 2), out, 1.0, np.array([1, 2]))
    with pytest.raises(PayloadError):
        kernels.scatter(block, out, positions[0], torch.ones(2))
    assert out.sum() == 2


@pytest.mark.parametrize("kernels", [cpu, reference])
def test_unambiguous_is_what_the_paper_says(kernels: object) -> None:
    """Step by step in float64, until some coordinates have been chosen."""
    block, alpha, decay = BLOCKS["odd layers"], 1.5, 0.9
    residual, moments = torch.zeros(BUFFER), torch.zeros(BUFFER)
    r, v = torch.zeros(BUFFER, dtype=torch.float64), torch.zeros(BUFFER, dtype=torch.float64)
    inside = torch.zeros(BUFFER, dtype=torch.bool)
    for part in block.parts(inside):
        part.fill_(True)
    chosen = 0
    for step in range(8):
        gradient = normal(step) + 0.5
        found = kernels.collect_unambiguous(block, Compensated(gradient, residual), None, moments, alpha, decay, 0.0, 0)
        kernels.subtract(block, residual, found[0], found[1])
        kernels.scatter(block, moments, found[0], torch.zeros(len(found[0])))
        r, v = r + gradient, v + gradient.double() ** 2
        sent = (r**2 > alpha * v) & inside
        assert int(sent.sum()) == len(found[0])
        chosen += len(found[0])
        r, v = torch.where(sent, 0, r), torch.where(sent, 0, v * decay)
        torch.testing.assert_close(residual[inside].double(), r[inside], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(moments[inside].double(), v[inside], rtol=1e-4, atol=1e-5)
    assert chosen > 1000


@settings(max_examples=300, deadline=None)
@given(universe=st.integers(1, 1 << 45), count=st.integers(1, 1 << 20), fewer=st.integers(0, 1 << 20))
def test_fewer_positions_need_at_most_a_word_more(universe: int, count: int, fewer: int) -> None:
    count = min(count, universe)
    fewer = min(fewer, count)
    assert reference.elias_fano_bytes(fewer, universe) <= reference.elias_fano_bytes(count, universe) + 4


def test_fewer_positions_need_at_most_a_word_more_in_small_universes() -> None:
    for universe in range(1, 200):
        sizes = [reference.elias_fano_bytes(count, universe) for count in range(universe + 1)]
        assert all(max(sizes[: count + 1]) <= sizes[count] + 4 for count in range(universe + 1))


def test_what_is_called_from_python_compiles_once() -> None:
    loops = {
        "statistics": ("_statistics", "_sign_counts", "_exceedances"),
        "threshold": ("_collect_reaching", "_collect_drawn", "_collect_unambiguous", "_collect_local_maxima"),
    }
    for file, names in loops.items():
        for name in names:
            assert len(getattr(sys.modules[f"gradwire.kernels.cpu.{file}"], name).signatures) == 1, name
