"""What in Triton handles values one by one has the bits of the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from interpreted import BLOCKS, by_the_gpu, of_all_kinds  # noqa: F401

from gradwire.errors import PayloadError
from gradwire.kernels import Compensated, gpu, reference
from gradwire.layout import Block
from guarded import copied, guarded, release
from kernel_inputs import BUFFER, GRADIENTS, KEY, block_of, counts_of, covered, normal, same

each_block = pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS.keys())


@each_block
@pytest.mark.parametrize("when", [None, torch.tensor(True), torch.tensor(False)])
def test_accumulate(block: Block, when: torch.Tensor | None) -> None:
    outcomes = []
    for kernels in (gpu, reference):
        residual = normal(9)
        finite = kernels.accumulate(block, of_all_kinds(block), residual, 0.9, 0.3, when)
        outcomes.append((residual, bool(finite)))
    assert same(outcomes[0][0], outcomes[1][0])
    assert outcomes[0][1] == outcomes[1][1]


@each_block
def test_narrow(block: Block) -> None:
    own, specified = (torch.full((BUFFER,), 7.0, dtype=torch.bfloat16) for _ in range(2))
    values = of_all_kinds(block).nan_to_num_(posinf=3.4028235e38)
    gpu.narrow(block, values, own, KEY)
    reference.narrow(block, values, specified, KEY)
    assert torch.equal(own.view(torch.int16), specified.view(torch.int16))


@pytest.mark.parametrize("shape", [(1, 1), (3, 0), (3, 4097), (2, 10_000)])
def test_checksums(shape: tuple[int, int]) -> None:
    words = torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, generator=torch.Generator().manual_seed(1)).int()
    own, specified = torch.ones(shape[0], dtype=torch.int64), torch.ones(shape[0], dtype=torch.int64)
    gpu.checksums(words, own)
    reference.checksums(words, specified)
    assert torch.equal(own, specified)


@each_block
@pytest.mark.parametrize("share", [0.05, 1.0])
def test_chosen_at_random(block: Block, share: float) -> None:
    counts = counts_of(block, share)
    own, specified = (torch.full((int(counts.sum()),), -1) for _ in range(2))
    gpu.randomk_positions(block, counts, own, KEY)
    reference.randomk_positions(block, counts, specified, KEY)
    assert torch.equal(own, specified)


def chosen(block: Block, rows: int) -> torch.Tensor:
    counts = counts_of(block, 0.1)
    positions = torch.empty(rows, int(counts.sum()), dtype=torch.int64)
    for row in range(rows):
        reference.randomk_positions(block, counts, positions[row], KEY + row)
    return positions.sort(1).values


@each_block
def test_values_at_positions(block: Block) -> None:
    positions, outcomes = chosen(block, 3), []
    values = normal(4)[: positions.numel()].view_as(positions).clone()
    values[:, ::7], values[:, 3::7] = torch.nan, -0.0
    for kernels in (gpu, reference):
        read, left, put, sums, some = torch.zeros(positions.shape[1]), normal(5), normal(6), normal(7), normal(8)
        kernels.gather(block, normal(2), positions[0], read)
        kernels.subtract(block, left, positions[0], values[0])
        kernels.scatter(block, put, positions[1], values[1])
        kernels.scatter_sum(block, positions, values, sums, 1 / 3)
        filled = np.minimum([positions.shape[1], 1, 0], positions.shape[1])
        kernels.scatter_sum(block, positions, values, some, 1 / 3, filled)
        outcomes.append((read, left, put, sums, some))
    for own, specified in zip(*outcomes, strict=True):
        assert same(own, specified)


@pytest.mark.parametrize("position", [-1, 5, 7, 72, 2**40])
def test_a_position_in_no_run_changes_nothing_else(position: int) -> None:
    block = block_of([5, 64])
    rows, elsewhere = torch.tensor([[0, 8], [1, position]]), ~covered(block)
    for number, call in enumerate(
        (
            lambda out: gpu.scatter_sum(block, rows, torch.ones(2, 2), out, 0.5),
            lambda out: gpu.scatter_sum(block, rows[1:], torch.ones(1, 2), out, 0.5),
            lambda out: gpu.scatter(block, out, rows[1], torch.ones(2)),
            lambda out: gpu.subtract(block, out, rows[1], torch.ones(2)),
        )
    ):
        out = normal(number)
        with pytest.raises(PayloadError, match=f"position {position} lies in no run"):
            call(out)
        assert torch.equal(out[elsewhere], normal(number)[elsewhere])


@each_block
@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize("weight", [1 / 3, -2.0])
def test_sums_of_rows_in_any_order(block: Block, rows: int, weight: float) -> None:
    positions = chosen(block, rows)
    for order in ("ascending", "one not", "descending", "the end not"):
        match order:
            case "one not":
                positions[-1] = positions[-1].flip(0)
            case "descending":
                positions = positions.flip(1)
            case "the end not":
                positions[0, -2:] = positions[0, -2:].flip(0)
        values = normal(5)[: positions.numel()].view_as(positions)
        own, specified = normal(1), normal(1)
        gpu.scatter_sum(block, positions, values, own, weight)
        reference.scatter_sum(block, positions, values, specified, weight)
        assert same(own, specified)


def test_sums_of_rows_that_leave_tiles_out() -> None:
    block = block_of((9000, 3, 2000))
    positions = torch.tensor([[8999, 9001, 9002], [0, 1, 10_999], [4095, 4096, 4097]])
    values = normal()[:9].view(3, 3)
    for filled in (None, np.array([0, 2, 3])):
        own, specified = normal(1), normal(1)
        gpu.scatter_sum(block, positions, values, own, 0.3, filled)
        reference.scatter_sum(block, positions, values, specified, 0.3, filled)
        assert same(own, specified)


SELECTED = {**BLOCKS, "chunks": block_of((4129, 33, 500)), "chunks of runs": block_of((4129, 1, 500), "bucket")}


@pytest.mark.parametrize("memory", [None, (0.9, 0.3)], ids=["none", "weighted"])
@pytest.mark.parametrize("name", SELECTED)
def test_largest(name: str, memory: tuple[float, float] | None) -> None:
    block = SELECTED[name]
    for share, gradient in ((0.1, of_all_kinds(block)), (0.5, GRADIENTS["ties"]), (1.0, normal(1))):
        counts, outcomes = counts_of(block, share), []
        counts[2::4] = 0
        for kernels in (gpu, reference):
            residual = None if memory is None else normal(2).round()
            weights = memory or (1.0, 1.0)
            places, values = torch.full((int(counts.sum()),), -1), torch.zeros(int(counts.sum()))
            kernels.topk_select(block, Compensated(gradient, residual, *weights), counts, places, values)
            outcomes.append((places, values, torch.zeros(1) if residual is None else residual))
        for own, specified in zip(*outcomes, strict=True):
            assert same(own, specified)


@pytest.mark.parametrize("end", [True, False])
def test_stays_inside(end: bool) -> None:
    block = block_of([77, 41], hole=0).packed()
    numel = int(block.runs[-1, 0] + block.runs[-1, 1])
    gradient, residual = copied(normal(1)[:numel], end), copied(normal(2)[:numel], end)
    positions = copied(chosen(block, 2), end)
    values = guarded(positions.numel(), end).view_as(positions)
    gpu.accumulate(block, gradient, residual, 0.9, 0.1)
    gpu.narrow(block, gradient, guarded(numel, end, torch.bfloat16), KEY)
    gpu.gather(block, gradient, positions[0], values[0])
    gpu.subtract(block, residual, positions[1], values[0])
    gpu.scatter_sum(block, positions, values, gradient, 0.5)
    gpu.randomk_positions(block, counts_of(block, 0.1), positions[0], KEY)
    for wanted in (block, block_of([4125], hole=0)):
        source = copied(normal(1)[: int(wanted.runs[:, 1].sum()) + int(wanted.runs[0, 0]) + 8], end)
        counts = counts_of(wanted, 0.1)
        room = int(counts.sum())
        gpu.topk_select(wanted, Compensated(source), counts, guarded(room, end, torch.int64), guarded(room, end))
    gpu.checksums(gradient.view(torch.int32)[None], guarded(1, end, torch.int64))
    del gradient, residual, positions, values
    release()
