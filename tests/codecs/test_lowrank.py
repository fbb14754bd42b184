"""Products with thin factors: the compiled kernels against plain torch, up to the order of sums."""

from __future__ import annotations

import pytest
import torch

from gradwire.codecs.lowrank import orthonormal
from gradwire.kernels import Compensated, cpu, reference
from gradwire.layout import Block, Granularity, Slot
from together import together

OFFSET = 3


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@together("bad", [None, float("inf"), float("nan")])
@together("subtract", [False, True])
@together("keeps", [False, True])
@together("by_rows", [False, True])
@together(("n", "m", "rank"), [(1, 1, 1), (5, 7, 1), (64, 147, 4), (33, 65, 6), (2, 300, 3), (40, 9, 9)])
def test_fused_projection_is_the_reference(
    n: int, m: int, rank: int, by_rows: bool, keeps: bool, subtract: bool, bad: float | None
) -> None:
    block = Block.cut([Slot("matrix", (n, m), OFFSET)], Granularity("layer"))
    gradient = draw(n * m + 5, seed=1)
    if bad is not None:
        gradient[OFFSET + n * m // 2] = bad
    results = []
    for kernel in (cpu, reference):
        residual = draw(n * m + 5, seed=2)
        untouched = residual.clone()
        p, q = draw(rank, n, seed=3), draw(rank, m, seed=4)
        project, fixed, computed = (kernel.project_rows, q, p) if by_rows else (kernel.project_columns, p, q)
        back = 2 * fixed if subtract else None
        finite = project(block, Compensated(gradient, residual if keeps else None, 0.5, 2.0), fixed, computed, back)
        assert finite == (bad is None)
        assert torch.equal(residual[:OFFSET], untouched[:OFFSET])
        assert torch.equal(residual[OFFSET + n * m :], untouched[OFFSET + n * m :])
        results.append((computed, residual))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("rank", [1, 4, 7])
def test_product_is_written_and_taken_from_the_residual(rank: int) -> None:
    n, m = 19, 43
    block = Block.cut([Slot("matrix", (n, m), OFFSET)], Granularity("layer"))
    p, q = draw(rank, n, seed=5), draw(rank, m, seed=6)
    for kernel in (cpu, reference):
        out, residual = torch.zeros(n * m + 5), draw(n * m + 5, seed=7)
        before = residual.clone()
        kernel.write_product(block, p, q, out, residual)
        torch.testing.assert_close(out[OFFSET : OFFSET + n * m].view(n, m), p.T @ q)
        torch.testing.assert_close(residual + out, before, rtol=0, atol=1e-6)


@pytest.mark.parametrize("by_rows", [False, True])
def test_what_is_left_beyond_float32_stays_out_of_the_residual(by_rows: bool) -> None:
    """Matrix and factors are finite, what is left of the matrix is not where the fixed factor is 0.4."""
    n, m = 6, 37
    block = Block.cut([Slot("matrix", (n, m), 0)], Granularity("layer"))
    p, q = torch.zeros(1, n), torch.zeros(1, m)
    fixed = q if by_rows else p
    fixed[0, 0], fixed[0, 1], fixed[0, -1] = 0.4, -1.0, 0.4
    overflows = ((fixed[0] == 0.4) if by_rows else (fixed[0] == 0.4)[:, None]).expand(n, m)
    for kernel in (cpu, reference):
        residual = torch.full((n, m), 0.5)
        project, first, computed = (kernel.project_rows, q, p) if by_rows else (kernel.project_columns, p, q)
        gradient = torch.full((n * m,), 3.3e38)
        assert project(block, Compensated(gradient, residual.view(-1)), first, computed, first)
        assert torch.equal(residual == 0.5, overflows)
        assert residual.isfinite().all()
        residual, factors = torch.full((n * m,), 3e38), (torch.full((1, n), -1e19), torch.full((1, m), 1e19))
        kernel.write_product(block, *factors, torch.empty(n * m), residual)
        assert (residual == 3e38).all()


@pytest.mark.parametrize("rows", [torch.zeros(2, 3, 10), torch.ones(1, 4, 50), draw(3, 2, 6, seed=8)], ids=str)
def test_orthonormal_rows_even_of_dependent_and_zero_ones(rows: torch.Tensor) -> None:
    (basis,) = orthonormal([rows])
    identity = torch.eye(rows.shape[1]).expand(len(rows), -1, -1)
    torch.testing.assert_close(basis @ basis.mT, identity, rtol=0, atol=1e-5)
