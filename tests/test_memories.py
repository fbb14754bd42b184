"""What each memory promises beyond the law of conservation."""

from __future__ import annotations

import torch
import torch.distributed as dist

import gradwire
from gradwire import memory
from gradwire.layout import Block, Granularity, flat_slots
from gradwire.memory import Store
from pool import Pool

SHAPE = (40, 50)


def gradient(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(100 * rank + step))


def averages(method: str, steps: int, changing: bool, **options: object) -> list[torch.Tensor]:
    parameter = torch.nn.Parameter(torch.zeros(SHAPE))
    sync = gradwire.Synchronizer([("weight", parameter)], method, **options)
    found = []
    for step in range(steps):
        parameter.grad = gradient(dist.get_rank(), step if changing else 0)
        sync.synchronize()
        found.append(parameter.grad.clone())
    sync.close()
    return found


def test_ef21_reaches_the_mean_of_gradients_that_stay(pool: Pool) -> None:
    mean = (gradient(0) + gradient(1)) / 2
    for method, options in (("topk", {"ratio": 0.1}), ("efsignsgd", {"route": "gather"})):
        found = pool.run(2, averages_with, method, 40, False, {"memory": "ef21", **options})[0]
        errors = [float((average - mean).norm() / mean.norm()) for average in found]
        assert errors[0] > 0.3
        assert errors[-1] < 0.1, (method, errors[-1])


def averages_with(method: str, steps: int, changing: bool, options: dict[str, object]) -> list[torch.Tensor]:
    return averages(method, steps, changing, **options)


def test_momentum_in_full_is_the_mean_of_momenta(pool: Pool) -> None:
    found = pool.run(2, averages_with, "dense", 4, True, {"memory": "momentum"})[0]
    expected = torch.zeros(SHAPE)
    for step, average in enumerate(found):
        expected = 0.9 * expected + 0.1 * (gradient(0, step) + gradient(1, step)) / 2
        torch.testing.assert_close(average, expected)


def test_masked_momentum_follows_the_papers_algorithm(pool: Pool) -> None:
    """Algorithm 4 of Lin et al. written out, against what one worker sends."""
    for nesterov in (False, True):
        carried = memory.MaskedMomentum(momentum=0.9, nesterov=nesterov)
        found = pool.run(1, averages_with, "topk", 5, True, {"ratio": 0.1, "memory": carried})[0]
        u, v = torch.zeros(SHAPE), torch.zeros(SHAPE)
        for step, average in enumerate(found):
            g = gradient(0, step)
            u = 0.9 * (u + g) if nesterov else 0.9 * u + g
            v = v + u + g if nesterov else v + u
            sent = v.abs() >= v.abs().flatten().topk(200).values[-1]
            torch.testing.assert_close(average, torch.where(sent, v, 0))
            u, v = torch.where(sent, 0, u), torch.where(sent, 0, v)


def test_no_memory_keeps_what_is_not_finite() -> None:
    slots = flat_slots([("weight", SHAPE)])
    block = Block.cut(slots, Granularity("layer"))
    for name, make in memory.NAMES.items():
        store = Store(torch.device("cpu"))
        feedback = make().feedback(store, "residual", slots, 2000)
        bad = gradient(0).flatten()
        bad[7] = torch.nan
        admitted = feedback.admit(block, bad)
        assert not admitted.isfinite().all(), name
        feedback.settle(block, bad)
        feedback.received(block, bad.clone())
        for tensors in store.state().values():
            assert tensors["weight"].isfinite().all(), name
