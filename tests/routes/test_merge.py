"""Sets that are merged pair by pair: kernels, order of sums, what is kept by whom, and bad payloads."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire.codecs.index import EliasFano
from gradwire.errors import PayloadError
from gradwire.kernels import cpu, reference
from gradwire.layout import Block, Granularity, flat_slots
from gradwire.routes.merge import SparseFormat, SparseSet
from kernel_inputs import same
from pool import Pool

COUNTS = np.array([5, 0, 1, 40, 700], dtype=np.int64)


def sparse_set(seed: int, values: str) -> SparseSet:
    """Positions of segments of 50, 8, 8, 64 and 2,000 elements, one after another."""
    generator = torch.Generator().manual_seed(seed)
    starts, sizes = [0, 56, 64, 72, 136], [50, 8, 8, 64, 2000]
    positions = torch.cat(
        [
            start + torch.randperm(size, generator=generator)[:count].sort().values
            for start, size, count in zip(starts, sizes, COUNTS.tolist(), strict=True)
        ]
    )
    drawn = torch.randn(len(positions), generator=generator)
    if values == "ties":
        drawn = drawn.mul(2).round()
    if values == "huge":
        drawn = drawn.sign() * 3e38
    if values == "nan":
        drawn[20] = math.nan
    return SparseSet(positions, drawn)


@pytest.mark.parametrize("values", ["normal", "ties", "huge", "nan"])
@pytest.mark.parametrize("seed", range(5))
def test_merging_is_the_reference(values: str, seed: int) -> None:
    first, second = sparse_set(seed, values), sparse_set(100 + seed, values)
    results = []
    for kernels in (cpu, reference):
        result = SparseSet.empty(COUNTS, torch.device("cpu"))
        kernels.merge_top(
            COUNTS, first.positions, first.values, second.positions, second.values, result.positions, result.values
        )
        results.append(result)
    flags = [torch.ones(len(first.positions), dtype=torch.bool) for _ in (cpu, reference)]
    for kernels, flag in zip((cpu, reference), flags, strict=True):
        kernels.survivors(first.positions, results[0].positions, results[0].values, flag)
    assert torch.equal(*flags)
    kept = torch.isin(first.positions, results[0].positions[results[0].values.isfinite()])
    assert torch.equal(flags[0], kept)
    assert torch.equal(results[0].positions, results[1].positions)
    assert same(results[0].values, results[1].values)
    assert (results[0].positions.diff() > 0).all()
    if values == "nan":
        assert results[0].values[6:46].isnan().all()
        assert results[0].values[46:].isfinite().all()


NUMEL, RATIO = 500, 0.1


def local(rank: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank)) ** 3


def top(values: torch.Tensor) -> torch.Tensor:
    """Zero but for the largest magnitudes."""
    chosen = values.abs().sort(descending=True, stable=True).indices[: round(RATIO * NUMEL)]
    return torch.zeros(NUMEL).index_copy(0, chosen, values[chosen])


def tree(workers: int) -> torch.Tensor:
    """What all of them should have: those beyond a power of two fold in, then pairs of neighbours."""
    sets = [top(local(rank)) for rank in range(workers)]
    core = 1 << (workers.bit_length() - 1)
    sets = [top(sets[i] + sets[i + core]) if i + core < workers else sets[i] for i in range(core)]
    while len(sets) > 1:
        sets = [top(low + high) for low, high in zip(sets[::2], sets[1::2], strict=True)]
    return sets[0]


def one_step() -> tuple[torch.Tensor, torch.Tensor, int]:
    parameter = torch.nn.Parameter(torch.zeros(NUMEL))
    policy = gradwire.DensePolicy(below=0, vectors=False)
    sync = gradwire.Synchronizer([("w", parameter)], "gtopk", ratio=RATIO, dense=policy)
    parameter.grad = local(dist.get_rank())
    sync.synchronize()
    result = parameter.grad, sync.state_dict()["tensors"]["residual"]["w"], sync.stats().wire_bytes
    sync.close()
    return result


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
def test_the_result_is_that_of_the_tree_and_nothing_is_lost(pool: Pool, workers: int) -> None:
    results = pool.run(workers, one_step)
    expected = tree(workers) * torch.tensor(1 / workers)
    size = 4 * 50 + EliasFano().size(50, 504)
    rounds = math.floor(math.log2(workers))
    for rank, (average, residual, wire_bytes) in enumerate(results):
        assert torch.equal(average, expected)
        kept = (residual == local(rank)) | (residual == 0)
        assert kept.all(), "a value is sent whole or not at all"
        core = 1 << rounds
        folds = rank >= core or rank + core < workers
        assert wire_bytes <= (rounds + 2 * folds) * size + 8
    put_in = sum(local(rank).double() for rank in range(workers))
    owed = sum(residual.double() for _, residual, _ in results)
    torch.testing.assert_close(expected.double() * workers + owed, put_in, rtol=1e-6, atol=1e-6)


def returning() -> tuple[torch.Tensor, torch.Tensor]:
    """Element 0 is dropped by ranks 0 and 1, whose sum it loses in, and comes back from ranks 2 and 3."""
    values = {0: [3.0, 0.0, 0.0], 1: [0.0, 4.0, 0.0], 2: [9.0, 0.0, 0.0], 3: [0.0, 0.0, 1.0]}[dist.get_rank()]
    parameter = torch.nn.Parameter(torch.zeros(3))
    policy = gradwire.DensePolicy(below=0, vectors=False)
    sync = gradwire.Synchronizer([("w", parameter)], "gtopk", ratio=0.3, dense=policy)
    parameter.grad = torch.tensor(values)
    sync.synchronize()
    result = parameter.grad, sync.state_dict()["tensors"]["residual"]["w"]
    sync.close()
    return result


def test_a_value_whose_position_comes_back_from_others_stays_with_its_worker(pool: Pool) -> None:
    results = pool.run(4, returning)
    assert [average.tolist() for average, _ in results] == [[2.25, 0.0, 0.0]] * 4
    assert [residual.tolist() for _, residual in results] == [[3.0, 0, 0], [0, 4.0, 0], [0, 0, 0], [0, 0, 1.0]]


def test_payloads_of_another_segment_are_refused() -> None:
    block = Block.cut(flat_slots([("a", (16,)), ("b", (16,))]), Granularity("layer"))
    form = SparseFormat(block, np.array([1, 1], dtype=np.int64), EliasFano())
    good = SparseSet(torch.tensor([3, 20]), torch.ones(2))
    content, flags = form.read(form.write(good, torch.tensor([True, False])))
    assert torch.equal(content.positions, good.positions)
    assert flags.tolist() == [True, False]
    for positions in ([3, 4], [16, 17]):
        bad = form.write(SparseSet(torch.tensor(positions), torch.ones(2)))
        with pytest.raises(PayloadError, match="outside the segment"):
            form.read(bad)
