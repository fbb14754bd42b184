"""Orthonormal rows in Triton have the bits of the reference, which any order of sums gives."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from interpreted import by_the_gpu  # noqa: F401

from gradwire.codecs import lowrank
from gradwire.kernels import dispatch, gpu, reference
from guarded import copied, release

SHAPES = [(1, 1, 1), (2, 1, 300), (3, 4, 4), (2, 5, 777), (1, 9, 130), (1, 3, 4500)]
"""Matrices, rows, columns: more than a tile has, too."""


def of(shape: tuple[int, int, int], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["normal", "tiny", "huge", "dependent", "zero rows", "first column", "not finite"])
def test_orthonormal_rows_are_the_reference_s(shape: tuple[int, int, int], kind: str) -> None:
    rows = of(shape)
    match kind:
        case "tiny":
            rows *= 2.0**-140
        case "huge":
            rows *= 2.0**124
        case "dependent":
            rows[:, -1] = -3 * rows[:, 0]
        case "zero rows":
            rows[:, shape[1] // 2] = 0
        case "first column":
            rows[:, :, 1:] = 0
        case "not finite":
            rows[0, 0, -1] = torch.inf
    expected = rows.clone()
    reference.orthonormalise(expected)
    gpu.orthonormalise(rows)
    assert torch.equal(expected.view(torch.int32)[1:], rows.view(torch.int32)[1:])
    assert torch.equal(expected.isnan(), rows.isnan())
    assert torch.equal(expected.nan_to_num(), rows.nan_to_num())


def test_rows_of_a_million_values_are_the_reference_s() -> None:
    rows = of((1, 2, (1 << 20) + 5))
    rows[0, 0, 77] = 20
    expected = rows.clone()
    reference.orthonormalise(expected)
    gpu.orthonormalise(rows)
    assert torch.equal(expected.view(torch.int32), rows.view(torch.int32))


def spoilt(factors: list[torch.Tensor]) -> list[torch.Tensor]:
    """With a row of zeros, tiny, huge and infinite values among them."""
    factors[1][0, 0] = 0
    factors[3][0] *= 2.0**-140
    factors[3][1] *= 2.0**124
    factors[4][0, 2, 7] = torch.inf
    return factors


@pytest.mark.parametrize("name", ["orthonormal", "scaled"])
def test_matrices_of_all_shapes_at_once(name: str) -> None:
    function, factors = getattr(lowrank, name), spoilt([of(shape, seed) for seed, shape in enumerate(SHAPES)])
    given = [each.clone() for each in factors]
    found = function(factors)
    with mock.patch.object(dispatch, "overrides", return_value={}):
        expected = function(factors)
    for own, specified, kept, before in zip(found, expected, factors, given, strict=True):
        assert torch.equal(own.isnan(), specified.isnan())
        nan = own.isnan()
        assert torch.equal(own.masked_fill(nan, 0).view(torch.int32), specified.masked_fill(nan, 0).view(torch.int32))
        assert torch.equal(kept, before)


def test_zeros_are_refilled() -> None:
    factors = spoilt([of(shape, seed) for seed, shape in enumerate(SHAPES)])
    starts = lowrank.scaled([of(shape, 10 + seed) for seed, shape in enumerate(SHAPES)])
    for rows in factors:
        rows[..., ::3] = 0
    starts[5][0, 1, :7] = 0
    given = [each.clone() for each in factors]
    found = lowrank.refilled(factors, starts)
    with mock.patch.object(dispatch, "overrides", return_value={}):
        expected = lowrank.refilled(factors, starts)
    for own, specified, kept, before in zip(found, expected, factors, given, strict=True):
        assert torch.equal(own.isnan(), specified.isnan())
        assert torch.equal(own.nan_to_num().view(torch.int32), specified.nan_to_num().view(torch.int32))
        assert torch.equal(kept, before)
    assert not (found[1][:, :, 0] == 0).any()


@pytest.mark.parametrize("end", [True, False])
def test_stays_inside(end: bool) -> None:
    rows = copied(of((2, 3, 301)).view(-1), end).view(2, 3, 301)
    gpu.orthonormalise(rows)
    del rows
    release()
