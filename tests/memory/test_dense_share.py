"""What is not worth compressing is averaged as its method and memory would have it, if nothing were left unsent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from catalogue import OPTIONS, possible_memories
from gradwire import methods
from gradwire.engine.configuration import Configuration
from gradwire.layout import flat_slots
from gradwire.local.world import LocalWorld
from gradwire.memory import MaskedMomentum, Residual
from gradwire.policy import DensePolicy

WORKERS = 3
SLOTS = flat_slots([("first", (40,)), ("weight", (40, 50)), ("small", (3, 5)), ("bias", (17,))])
DENSE = torch.tensor([not 40 <= place < 2040 for place in range(SLOTS[-1].stop)])


def averaged(method: str, inputs: Sequence[Sequence[torch.Tensor]], **choices: Any) -> torch.Tensor:
    """What goes dense in each of some steps, ``float32[steps, d]``."""
    options = OPTIONS.get(method, [{}])[0]
    world = LocalWorld(Configuration.make(method, options, dense=DensePolicy(), **choices), SLOTS, len(inputs[0]))
    found = []
    for gradients in inputs:
        buffers = [gradient.clone() for gradient in gradients]
        world.average(buffers)
        assert all(torch.equal(buffers[0].nan_to_num(), other.nan_to_num()) for other in buffers)
        found.append(buffers[0][DENSE])
    return torch.stack(found)


def noise(steps: int = 4) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [[torch.randn(SLOTS[-1].stop, generator=generator) for _ in range(WORKERS)] for _ in range(steps)]


def means(inputs: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.stack(list(gradients)).mean(0)[DENSE] for gradients in inputs]


def momentum(inputs: Sequence[Sequence[torch.Tensor]], nesterov: bool = False) -> torch.Tensor:
    """SGD's, written out."""
    velocity, found = torch.zeros(int(DENSE.sum())), []
    for mean in means(inputs):
        velocity = 0.9 * (velocity + mean) if nesterov else 0.9 * velocity + mean
        found.append(velocity + mean if nesterov else velocity)
    return torch.stack(found)


@pytest.mark.parametrize("name", [name for name in methods.names() if not methods.get(name).takes_all])
def test_the_memory_does_to_dense_tensors_what_it_does_to_compressed_ones(name: str) -> None:
    """With masked momentum it is SGD's momentum; with any other memory what ``dense`` averages with it."""
    inputs, kind = noise(), methods.get(name)
    for carried in possible_memories(kind, OPTIONS.get(name, [{}])[0]):
        found = averaged(name, inputs, memory=carried)
        plain = "none" if carried == "diana" else carried  # dense, which has no error, has no use for it
        expected = momentum(inputs) if carried == "dgc" else averaged("dense", inputs, memory=plain)
        torch.testing.assert_close(found, expected, msg=f"{name} with {carried}")


def test_a_constant_gradient_gathers_speed() -> None:
    constant = [[torch.full((SLOTS[-1].stop,), 0.5)] * 2] * 3
    for name, choices in {"dgc": {}, "sketchedsgd": {}, "topk": {"memory": "dgc"}}.items():
        found = averaged(name, constant, **choices)
        torch.testing.assert_close(found[:, 0], torch.tensor([0.5, 0.95, 1.355]), msg=name)
    slow = averaged("topk", constant, memory="momentum")
    torch.testing.assert_close(slow[:, 0], 0.5 * (1 - 0.9 ** torch.arange(1, 4)))


def test_nesterov_and_weights_hold_for_dense_tensors() -> None:
    inputs = noise()
    found = averaged("topk", inputs, memory=MaskedMomentum(nesterov=True))
    torch.testing.assert_close(found, momentum(inputs, nesterov=True))
    for dtype in ("float32", "bfloat16"):
        halved = averaged("efsignsgd", inputs, memory=Residual(gamma=0.5, dtype=dtype))
        torch.testing.assert_close(halved, 0.5 * torch.stack(means(inputs)))


def test_methods_whose_average_is_no_mean_take_all_tensors() -> None:
    """Two of three workers see a minus everywhere, though the mean is above zero."""
    votes = [[torch.full((SLOTS[-1].stop,), value) for value in (0.9, -0.2, -0.1)]]
    for name in ("signsgd", "signum"):
        assert averaged(name, votes).eq(-1).all(), name
    assert averaged("demo", [[torch.full((SLOTS[-1].stop,), 0.5)] * 2]).eq(1).all()


def test_momenta_of_dense_tensors_take_no_more_room_than_they() -> None:
    world = LocalWorld(Configuration.make("dgc", {}), SLOTS, 2)
    kept = {id(buffer): buffer.numel() for buffer in world.engines[0].store.buffers(["first", "small", "bias"])}
    assert sum(kept.values()) == int(DENSE.sum())


def test_a_bad_step_leaves_momenta_of_dense_tensors_finite() -> None:
    inputs = noise(3)
    inputs[1][2] = torch.full_like(inputs[1][2], torch.nan)
    for carried in possible_memories(methods.get("topk")):
        found = averaged("topk", inputs, memory=carried)
        assert found[1].isnan().all(), carried
        assert found[[0, 2]].isfinite().all(), carried
