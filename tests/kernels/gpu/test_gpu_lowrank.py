"""Products with thin factors: what the reference computes, up to the order of its sums, and marks where it does."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from interpreted import by_the_gpu  # noqa: F401
from torch import Tensor

from gradwire.codecs.lowrank import group, project_columns, project_rows, remember, write_products
from gradwire.kernels import Compensated, dispatch, gpu, reference
from gradwire.layout import Block, Granularity, Slot
from guarded import copied, guarded, release

SHAPES = [(1, 1, 1), (3, 257, 1), (70, 33, 4), (5, 600, 3), (129, 7, 7)]
"""Rows, columns and rank."""


def of(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def matrix(n: int, m: int) -> Block:
    """A matrix that begins 5 elements into its buffer."""
    return Block.cut([Slot("matrix", (n, m), 5)], Granularity("layer"))


def close(own: Tensor, specified: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(own, specified, rtol=1e-4, atol=atol, equal_nan=True)


@pytest.mark.parametrize(("n", "m", "rank"), SHAPES)
@pytest.mark.parametrize("keeps", [True, False])
def test_a_product_is_written_and_taken_from_the_residual(n: int, m: int, rank: int, keeps: bool) -> None:
    block, p, q = matrix(n, m), of(rank, n), of(rank, m, seed=1)
    outcomes = []
    for kernels in (gpu, reference):
        out, residual = of(5 + n * m + 3, seed=2), of(5 + n * m + 3, seed=3)
        kernels.write_product(block, p, q, out, residual if keeps else None)
        outcomes.append((out, residual))
    for own, specified in zip(*outcomes, strict=True):
        close(own, specified)
        assert torch.equal(own[:5], specified[:5])
        assert torch.equal(own[5 + n * m :], specified[5 + n * m :])


def test_a_product_that_is_not_finite_is_written_and_not_remembered() -> None:
    block, p, q = matrix(6, 300), of(2, 6), of(2, 300, seed=1)
    q[1, 280] = torch.nan
    out, residual = torch.zeros(5 + 1800), of(5 + 1800, seed=3)
    before = residual.clone()
    gpu.write_product(block, p, q, out, residual)
    lost = out[5:].view(6, 300).isnan()
    assert lost[:, 280].all()
    assert int(lost.sum()) == 6
    assert torch.equal(residual[5:].view(6, 300)[:, 280], before[5:].view(6, 300)[:, 280])


@pytest.mark.parametrize("subtract", [True, False])
@pytest.mark.parametrize("spoilt", [None, torch.nan, torch.inf])
@pytest.mark.parametrize("keeps", [True, False])
def test_projections(subtract: bool, spoilt: float | None, keeps: bool) -> None:
    n, m, rank = 40, 70, 3
    block = matrix(n, m)
    for name in ("project_rows", "project_columns"):
        outcomes = []
        for kernels in (gpu, reference):
            gradient, residual = of(5 + n * m, seed=2), of(5 + n * m, seed=3)
            if spoilt is not None:
                gradient[77] = spoilt
            given, found = (
                (of(rank, m), torch.zeros(rank, n)) if name == "project_rows" else (of(rank, n), torch.zeros(rank, m))
            )
            back = 2 * given if subtract else None
            finite = getattr(kernels, name)(
                block, Compensated(gradient, residual if keeps else None, 0.9, 0.3), given, found, subtract=back
            )
            assert bool(finite) == (spoilt is None)
            outcomes.append((found, residual))
        for own, specified in zip(*outcomes, strict=True):
            close(own, specified)


GROUPS = group(
    Block.cut(
        [Slot("a", (70, 33), 5), Slot("b", (5, 600), 2400), Slot("c", (70, 33), 5400), Slot("d", (129, 130), 8000)],
        Granularity("layer"),
    )
)
NUMEL = 8000 + 129 * 130 + 3


def factors(side: str, seed: int) -> list[Tensor]:
    return [of(len(each.slots), each.rank(4), getattr(each, side), seed=seed) for each in GROUPS]


@pytest.mark.parametrize("spoilt", [None, 77, 2500])
def test_matrices_of_all_shapes_at_once(spoilt: int | None) -> None:
    """What the reference makes of one after another; a matrix that is not finite changes nothing of others."""
    outcomes = []
    for at_once in (True, False):
        with nullcontext() if at_once else mock.patch.object(dispatch, "overrides", return_value={}):
            gradient, residual, out = (of(NUMEL, seed=seed) for seed in (2, 3, 4))
            if spoilt is not None:
                gradient[spoilt] = torch.nan
            source = Compensated(gradient, residual, 0.9, 0.3)
            p = project_rows(GROUPS, source, factors("m", 5), factors("m", 6))
            q = project_columns(GROUPS, Compensated(residual), factors("n", 7))
            write_products(GROUPS, factors("n", 8), factors("m", 9), out, residual)
            kept = factors("n", 10)
            outcomes.append((*p, *q, *remember(kept, [each.clone() for each in p]), *kept, residual, out))
    for own, specified in zip(*outcomes, strict=True):
        close(own, specified, atol=1e-3)


@pytest.mark.parametrize("end", [True, False])
def test_stays_inside(end: bool) -> None:
    n, m, rank = 9, 301, 3
    block = Block.cut([Slot("matrix", (n, m), 0)], Granularity("layer"))
    p, q = copied(of(rank * n), end).view(rank, n), copied(of(rank * m), end).view(rank, m)
    out, residual = guarded(n * m, end), copied(of(n * m), end)
    gpu.write_product(block, p, q, out, residual)
    del p, q, out, residual
    release()
