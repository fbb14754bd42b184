"""Methods that choose coordinates, held against what their papers compute."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.engine.configuration import Configuration
from gradwire.layout import flat_slots
from gradwire.local.world import LocalWorld
from gradwire.policy import DensePolicy

EVERYTHING = DensePolicy(below=0, vectors=False)
NUMEL = 300


def gradient(seed: int, power: int = 1) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)) ** power


def greedy(values: np.ndarray, share: float, rounds: int) -> np.ndarray:
    """Algorithm 3 of Wangni et al.: the probability of each coordinate."""
    size, magnitudes = share * values.size, np.abs(values)
    chances = np.minimum(size * magnitudes / magnitudes.sum(), 1)
    for _ in range(rounds):
        below = chances < 1
        factor = (size - values.size + below.sum()) / chances[below].sum()
        if factor <= 1:
            break
        chances = np.minimum(factor * chances, 1)
    return chances


@pytest.mark.parametrize(("rounds", "power"), [(0, 3), (1, 3), (2, 3), (2, 1)])
def test_gspar_draws_as_often_as_published(rounds: int, power: int) -> None:
    """Frequencies in 3,000 draws within 5 standard errors of the probabilities, and what is sent is g / p."""
    given, draws = gradient(0, power), 3000
    chances = greedy(given.double().numpy(), 0.1, rounds)
    configuration = Configuration.make("gspar", {"ratio": 0.1, "rounds": rounds}, dense=EVERYTHING)
    world, often = LocalWorld(configuration, flat_slots([("w", (NUMEL,))]), 1), np.zeros(NUMEL)
    for _ in range(draws):
        world.average([average := given.clone()])
        found = average.numpy()
        np.testing.assert_allclose(found[found != 0], (given.numpy() / chances)[found != 0], rtol=1e-5)
        often += found != 0
    assert (np.abs(often / draws - chances) <= 5 * np.sqrt(chances * (1 - chances) / draws) + 1e-6).all()
    assert (chances == 1).any() == (power == 3)


def test_gspar_has_room_for_what_is_drawn() -> None:
    """Of magnitudes that are alike the number varies most: all drawn are sent, which the mean of 2,000 steps shows."""
    given = torch.ones(NUMEL)
    world = LocalWorld(Configuration.make("gspar", {"ratio": 0.1}, dense=EVERYTHING), flat_slots([("w", (NUMEL,))]), 1)
    counts = []
    for _ in range(2000):
        world.average([average := given.clone()])
        counts.append(int(average.count_nonzero()))
    assert abs(np.mean(counts) - 30) <= 5 * np.sqrt(30 * 0.9 / len(counts))
    assert max(counts) > 40


def binary(values: np.ndarray, count: int) -> np.ndarray:
    """Algorithm 2 of Sattler et al.: what is sent of a tensor."""
    order = np.argsort(values, kind="stable")
    largest, smallest = order[-count:], order[:count]
    above, below = values[largest].mean(), -values[smallest].mean()
    sent = np.zeros_like(values)
    if above >= below:
        sent[largest] = above
    else:
        sent[smallest] = -below
    return sent


@pytest.mark.parametrize("shift", [0.0, 1.5, -1.5, 5.0], ids=str)
@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.4])
def test_sbc_sends_one_side_as_its_mean(ratio: float, shift: float) -> None:
    """For three steps with error feedback; also where one sign is rare, or not there at all."""
    configuration = Configuration.make("sbc", {"ratio": ratio}, dense=EVERYTHING)
    world, residual = LocalWorld(configuration, flat_slots([("w", (NUMEL,))]), 1), np.zeros(NUMEL)
    for step in range(3):
        given = gradient(step) + shift
        total = residual + given.double().numpy()
        expected = binary(total, round(ratio * NUMEL))
        residual = total - expected
        world.average([given])
        np.testing.assert_allclose(given.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("share", [0.1, 0.6, 1.0], ids=str)
def test_sbc_sends_what_few_have(share: float) -> None:
    """Values of the other sign are no zeros to be filled up with: else their mean may be 0, and nothing ever goes."""
    given = torch.zeros(NUMEL)
    few = round(share * 30)
    given[:few] = torch.tensor([1.0, -1.0]).repeat(few)[:few]
    for total in (given, -given, given - 1e-3, 1e-3 - given):
        found = gradwire.roundtrip(total, "sbc", ratio=0.1)
        np.testing.assert_allclose(
            np.sort(found.decoded.numpy()), np.sort(binary(total.double().numpy(), 30)), atol=1e-6
        )
        assert (found.decoded - total).norm() <= 0.995 * total.norm()


def test_sbc_has_two_sides() -> None:
    with pytest.raises(gradwire.ConfigurationError, match=r"ratio=0\.6 is out of range; choose 0 < ratio <= 0\.5"):
        gradwire.methods.SBC(ratio=0.6)


def test_sbc_takes_neither_values_nor_signs() -> None:
    found = gradwire.roundtrip(gradient(0).view(10, 30), "sbc", ratio=0.1, indices="raw")
    assert found.wire_bytes == 4 + 4 * 30
    assert len(found.decoded.unique()) == 2
