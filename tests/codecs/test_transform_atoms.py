"""Atoms: their chances, how they are drawn, and that they add up."""

from __future__ import annotations

import pytest
import torch

import gradwire
from gradwire.codecs.transform.atoms import probabilities, systematic


@pytest.mark.parametrize("budget", [1, 3, 7])
def test_chances_add_up_to_the_budget_and_have_least_variance(budget: int) -> None:
    sizes = torch.tensor([9.0, 3.0, 2.0, 1.0, 0.5, 0.4, 0.1, 0.01], dtype=torch.float64)
    chances = probabilities(sizes, budget)
    assert float(chances.sum()) == pytest.approx(budget)
    assert (chances <= 1 + 1e-12).all()
    uncertain = chances < 1 - 1e-12
    ratio = chances[uncertain] / sizes[uncertain]
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))
    assert (sizes[~uncertain] * ratio[0] >= 1 - 1e-12).all()


def test_chances_of_few_sizes() -> None:
    sizes = torch.tensor([2.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    assert probabilities(sizes, 3).tolist() == [1, 1, 0, 0]
    assert systematic(probabilities(sizes, 3), 0.7).tolist() == [0, 1]


def test_systematic_sampling_keeps_chances_and_count() -> None:
    chances = probabilities(torch.tensor([5.0, 2.0, 1.0, 1.0, 0.5, 0.25], dtype=torch.float64), 3)
    drawn = torch.zeros(6)
    for number in range(2000):
        indices = systematic(chances, (number + 0.5) / 2000)
        assert len(indices) == len(indices.unique()) == 3
        drawn[indices] += 1 / 2000
    torch.testing.assert_close(drawn.double(), chances, rtol=0, atol=1e-3)


@pytest.mark.parametrize("shape", [(30, 20), (20, 30), (16, 4, 3, 3)])
def test_all_atoms_are_the_matrix(shape: tuple[int, ...]) -> None:
    """A matrix of rank 3 has no more than 3 atoms."""
    generator = torch.Generator().manual_seed(1)
    n, m = shape[0], torch.Size(shape[1:]).numel()
    tensor = (torch.randn(n, 3, generator=generator) @ torch.randn(3, m, generator=generator)).view(shape)
    for scale in (1.0, 1e30, 1e-30):
        decoded = gradwire.roundtrip(tensor * scale, "atomo", rank=4).decoded
        torch.testing.assert_close(decoded / scale, tensor, rtol=1e-3, atol=1e-3)
