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


def test_low_pass_memory_is_the_filter_of_its_papers(pool: Pool) -> None:
    """``m = (1 - share) m + share (m + g - sent)`` written out, for one worker's top-k, with a new start every 3."""
    for reset in (0, 3):
        carried = memory.LowPass(share=0.3, reset=reset)
        for method in ("topk", "scalecom"):
            found = pool.run(1, averages_with, method, 7, True, {"ratio": 0.1, "memory": carried})[0]
            m = torch.zeros(SHAPE)
            for step, average in enumerate(found):
                t = m + gradient(0, step)
                chosen = t.abs() >= t.abs().flatten().sort(descending=True).values[round(0.1 * t.numel()) - 1]
                sent = torch.where(chosen, t, 0)
                torch.testing.assert_close(average, sent, msg=f"{method} {step}")
                m = 0.7 * m + 0.3 * (t - sent)
                if reset and (step + 1) % reset == 0:
                    m = torch.zeros(SHAPE)


def resumed_and_not() -> list[torch.Tensor]:
    """Steps with a low-pass memory, once in one go and once with a save and a load after the second."""
    found = []
    for stop in (None, 2):
        parameter = torch.nn.Parameter(torch.zeros(SHAPE))
        options = {"ratio": 0.1, "memory": memory.LowPass(share=0.3, reset=3)}
        sync = gradwire.Synchronizer([("weight", parameter)], "scalecom", **options)
        for step in range(5):
            if step == stop:
                state = sync.state_dict()
                sync.close()
                sync = gradwire.Synchronizer([("weight", parameter)], "scalecom", **options)
                sync.load_state_dict(state)
            parameter.grad = gradient(dist.get_rank(), step)
            sync.synchronize()
        sync.close()
        found.append(parameter.grad)
    return found


def test_low_pass_memory_resumes(pool: Pool) -> None:
    for first, second in pool.run(2, resumed_and_not):
        assert torch.equal(first, second)


def leaders(workers: int) -> None:
    """Each step's average is that of all workers' values where that step's leader has its largest."""
    rank = dist.get_rank()
    parameter = torch.nn.Parameter(torch.zeros(SHAPE))
    sync = gradwire.Synchronizer([("weight", parameter)], "scalecom", ratio=0.1, memory="none")
    for step in range(2 * workers):
        parameter.grad = gradient(rank, step)
        sync.synchronize()
        largest = gradient(step % workers, step).abs().flatten().topk(200).indices
        mean = sum(gradient(other, step) for other in range(workers)).flatten() / workers
        expected = torch.zeros(2000).index_copy(0, largest, mean[largest]).view(SHAPE)
        torch.testing.assert_close(parameter.grad, expected)
    sync.close()


def test_scalecom_leaders_take_turns(pool: Pool) -> None:
    pool.run(3, leaders, 3)


def test_loco_filters_the_errors_of_workers_and_owners(pool: Pool) -> None:
    """One worker on the sharded route, written out: it quantises its gradient, then as an owner the average."""
    found = pool.run(1, averages_with, "loco", 6, True, {"bucket": 64})[0]
    worker, owner = torch.zeros(SHAPE), torch.zeros(SHAPE)
    for step, average in enumerate(found):
        t = worker + gradient(0, step)
        sent = quantised(t)
        worker = 0.8 * worker + 0.2 * (t - sent)
        t = owner + sent
        expected = quantised(t)
        owner = 0.8 * owner + 0.2 * (t - expected)
        torch.testing.assert_close(average, expected)


def quantised(values: torch.Tensor) -> torch.Tensor:
    return gradwire.roundtrip(values, "qgz", bucket=64).decoded
