"""The cosine transform of chunks."""

from __future__ import annotations

import math

import pytest
import torch

from gradwire.codecs.transform import Chunks, chunk_sides
from gradwire.codecs.transform.cosine import cosines
from gradwire.layout import Slot


@pytest.mark.parametrize(
    ("shape", "sides"),
    [((64, 64), (64, 64)), ((16, 8, 3, 3), (16, 36)), ((40, 67), (40, 1)), ((1031,), (1, 1)), ((), (1, 1))],
)
def test_chunk_sides_are_the_largest_divisors(shape: tuple[int, ...], sides: tuple[int, int]) -> None:
    assert chunk_sides(shape, 64) == sides


@pytest.mark.parametrize("shape", [(64, 128), (130, 33), (16, 8, 3, 3), (300,), (1300, 96)])
def test_transform_is_that_of_every_chunk_and_inverts(shape: tuple[int, ...]) -> None:
    numel = math.prod(shape)
    chunks = Chunks.of(Slot("weight", shape, 5), 64)
    values = torch.randn(numel + 9, generator=torch.Generator().manual_seed(0))
    buffer = values.clone()
    chunks.transform(buffer)
    rows = shape[0] if len(shape) > 1 else 1
    matrix = values[5 : 5 + numel].view(rows, -1)
    for number, slot in enumerate(chunks.slots):
        i, j = number // chunks.across * chunks.n, number % chunks.across * chunks.m
        expected = cosines(chunks.n, values.device) @ matrix[i : i + chunks.n, j : j + chunks.m]
        expected = expected @ cosines(chunks.m, values.device).T
        torch.testing.assert_close(
            buffer[slot.offset : slot.stop].view(chunks.n, chunks.m), expected, rtol=0, atol=1e-5
        )
    chunks.invert(buffer)
    torch.testing.assert_close(buffer, values, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 9, 64])
def test_cosines_are_the_orthonormal_dct(size: int) -> None:
    matrix = cosines(size, torch.device("cpu"))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size), rtol=0, atol=1e-5)
    if size > 1:
        assert matrix[1, 0] == pytest.approx(math.sqrt(2 / size) * math.cos(math.pi / (2 * size)), abs=1e-6)
