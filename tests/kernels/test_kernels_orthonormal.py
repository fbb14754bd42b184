"""Orthonormal rows against the reference, bit for bit, and against the law."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire import exact, kernels
from gradwire.kernels import reference


@st.composite
def matrices(draw: st.DrawFn) -> torch.Tensor:
    """Some of them with dependent or zero rows, of any scale."""
    k, r = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    n = draw(st.integers(r, 70))
    rows = torch.randn(k, r, n, generator=torch.Generator().manual_seed(draw(st.integers(0, 1000))))
    if draw(st.booleans()):
        rows[:, r - 1] = -3 * rows[:, 0]
    if draw(st.booleans()):
        rows[0, r // 2] = 0
    if draw(st.booleans()):
        rows[:, :, 1:] = 0
    return rows * 2.0 ** draw(st.integers(-140, 100))


@given(rows=matrices())
@settings(max_examples=200, deadline=None)
def test_rows_are_orthonormal_and_the_reference_s(rows: torch.Tensor) -> None:
    expected, found = rows.clone(), rows.clone()
    reference.orthonormalise(expected)
    kernels.orthonormalise(found)
    assert torch.equal(expected.view(torch.int32), found.view(torch.int32))
    wide = found.double()
    assert (wide @ wide.mT - torch.eye(rows.shape[1], dtype=torch.float64)).abs().max() < 1e-6
    scaled = rows.double() / rows.double().abs().amax((1, 2), keepdim=True).clamp(min=1e-300)
    left = scaled - scaled @ wide.mT @ wide
    assert left.abs().max() < 1e-5


@pytest.mark.parametrize("worst", [torch.inf, torch.nan])
def test_a_matrix_that_is_not_finite_becomes_nan_alone(worst: float) -> None:
    rows = torch.randn(3, 2, 9, generator=torch.Generator().manual_seed(0))
    rows[1, 1, 4] = worst
    expected, found = rows.clone(), rows.clone()
    reference.orthonormalise(expected)
    kernels.orthonormalise(found)
    assert found[1].isnan().all()
    assert torch.equal(expected[::2], found[::2])
    assert found[::2].isfinite().all()


@pytest.mark.parametrize("scale", [1e-40, 1.0, 1e37])
def test_sums_depend_on_no_order(scale: float) -> None:
    values = torch.randn(5, 3001, generator=torch.Generator().manual_seed(1)) * scale
    shuffled = values[:, torch.randperm(3001, generator=torch.Generator().manual_seed(2))]
    for of, expected in (
        (exact.magnitudes, values.double().abs().sum(1, keepdim=True)),
        (exact.length, torch.linalg.vector_norm(values.double(), dim=1, keepdim=True)),
    ):
        assert torch.equal(of(values), of(shuffled))
        assert torch.allclose(of(values), expected, rtol=1e-10, atol=0)
    assert not exact.length(torch.zeros(2, 4)).any()


@pytest.mark.parametrize("outlier", [1.0, 8.0, 20.0, 1e3, 1e30])
@pytest.mark.parametrize("n", [(1 << 20) - 1, 1 << 20, 1 << 22, 1 << 24])
def test_lengths_of_millions_are_right(n: int, outlier: float) -> None:
    """However much larger than the others one value is."""
    values = torch.randn(n, generator=torch.Generator().manual_seed(3))
    values[n // 3] = outlier
    assert torch.allclose(exact.length(values), torch.linalg.vector_norm(values.double()), rtol=1e-7, atol=0)


@pytest.mark.parametrize("outlier", [1.0, 20.0, 1e3])
@pytest.mark.parametrize("n", [(1 << 20) - 1, 1 << 20, (1 << 22) + 3])
def test_rows_of_millions_are_orthonormal_and_the_reference_s(n: int, outlier: float) -> None:
    rows = torch.randn(1, 2, n, generator=torch.Generator().manual_seed(4))
    rows[0, 0, n // 3] = outlier
    expected = rows.clone()
    reference.orthonormalise(expected)
    kernels.orthonormalise(rows)
    assert torch.equal(expected.view(torch.int32), rows.view(torch.int32))
    wide = rows[0].double()
    assert (wide @ wide.mT - torch.eye(2, dtype=torch.float64)).abs().max() < 1e-6


@pytest.mark.parametrize("r", [7, 8, 16, 17, 40])
def test_many_rows_are_the_reference_s(r: int) -> None:
    """More than are worked on together, and just as many."""
    rows = torch.randn(2, r, 70, generator=torch.Generator().manual_seed(5))
    rows[1, r - 1] = rows[1, 0]
    expected = rows.clone()
    reference.orthonormalise(expected)
    kernels.orthonormalise(rows)
    assert torch.equal(expected.view(torch.int32), rows.view(torch.int32))
