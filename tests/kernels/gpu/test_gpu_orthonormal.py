"""Orthonormal rows in Triton have the bits of the reference, which any order of sums gives."""

from __future__ import annotations

import pytest
import torch
from interpreted import by_the_gpu  # noqa: F401

from gradwire.kernels import gpu, reference
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


@pytest.mark.parametrize("end", [True, False])
def test_stays_inside(end: bool) -> None:
    rows = copied(of((2, 3, 301)).view(-1), end).view(2, 3, 301)
    gpu.orthonormalise(rows)
    del rows
    release()
