"""What each memory promises beyond the law of conservation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire import memory
from gradwire.engine import Configuration, DensePolicy
from gradwire.layout import Block, Granularity, flat_slots
from gradwire.local.world import LocalWorld
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


def alone(method: str, carried: memory.Memory, steps: int, **options: Any) -> list[torch.Tensor]:
    """The averages of one worker of changing gradients, under the name that roundtrip gives a tensor."""
    route, everything = options.pop("route", None), DensePolicy(below=0, vectors=False)
    configuration = Configuration.make(method, options, route=route, memory=carried, dense=everything)
    world, found = LocalWorld(configuration, flat_slots([("tensor", SHAPE)]), 1), []
    for step in range(steps):
        flat = gradient(0, step).flatten()
        world.average([flat])
        found.append(flat.view(SHAPE))
    return found


def test_momentum_with_error_feedback_is_that_of_block_sgd() -> None:
    """dist-EF-blockSGDM's worker written out, its gradient weighed by ``1 - decay``."""
    for nesterov in (False, True):
        carried = memory.Momentum(0.8, nesterov=nesterov, memory=memory.Residual())
        m, e = torch.zeros(SHAPE), torch.zeros(SHAPE)
        for step, average in enumerate(alone("efsignsgd", carried, 6, route="gather")):
            g = gradient(0, step)
            m = 0.8 * m + g
            p = 0.2 * (0.8 * m + g if nesterov else m) + e
            sent = p.sign() * p.abs().mean()
            torch.testing.assert_close(average, sent)
            e = p - sent


def test_momentum_with_ef21_is_ef21_sgdm() -> None:
    """``v = (1 - eta) v + eta g``, ``h += C(v - h)``, with a memory and estimates that start from zero."""
    v, h = torch.zeros(SHAPE), torch.zeros(SHAPE)
    carried = memory.Momentum(decay=0.7, memory=memory.EF21())
    for step, average in enumerate(alone("topk", carried, 6, ratio=0.1)):
        v = 0.7 * v + 0.3 * gradient(0, step)
        difference = v - h
        chosen = difference.abs() >= difference.abs().flatten().topk(200).values[-1]
        h = h + torch.where(chosen, difference, 0)
        torch.testing.assert_close(average, h)


@pytest.mark.parametrize(("method", "options", "omega"), [("natural", {}, 1 / 8), ("randomk", {"ratio": 0.2}, 4)])
def test_diana_follows_the_papers_algorithm(method: str, options: dict[str, Any], omega: float) -> None:
    """Algorithm 1 of Mishchenko et al. written out, with what one worker's operator draws without a memory."""
    route = {"route": "gather"} if method == "natural" else {}
    h = torch.zeros(SHAPE)
    for step, average in enumerate(alone(method, memory.Diana(), 6, **options, **route)):
        q = gradwire.roundtrip(gradient(0, step) - h, method, memory="none", step=step, **options).decoded
        torch.testing.assert_close(average, h + q)
        h = h + q / (1 + omega)


def test_averages_with_diana_are_unbiased() -> None:
    """Both ways: the error of the mean over 300 seeds is within 5 of its standard errors, in the last of some steps."""
    everything = DensePolicy(below=0, vectors=False)
    slots = flat_slots([("weight", (20, 12))])
    gradients = [
        [torch.randn(240, generator=torch.Generator().manual_seed(9 * step + rank)) for rank in (0, 1)]
        for step in range(3)
    ]
    draws = []
    for seed in range(300):
        world = LocalWorld(Configuration.make("terngrad", {}, memory="diana", dense=everything, seed=seed), slots, 2)
        for step in gradients:
            flat = [each.clone() for each in step]
            world.average(flat)
        draws.append(flat[0].double())
    mean = torch.stack(gradients[-1]).double().mean(0)
    error, variance = torch.stack(draws).mean(0) - mean, torch.stack(draws).var(0) / 300
    assert (error * mean).sum().abs() <= 5 * (variance * mean.square()).sum().sqrt()
    assert 0.5 <= error.square().sum() / variance.sum() <= 1.5


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


@pytest.mark.parametrize(("granularity", "norms"), [("layer", 2), ("block:96", 2), ("model", 1)])
def test_local_clipping_is_of_each_worker_before_anything_adds_up(granularity: str, norms: int) -> None:
    """Three of four workers are clipped to half the norm, a parameter each or all as one; dense vectors go along."""
    slots, rounds = flat_slots([("weight", SHAPE), ("other", (30, 40)), ("bias", (17,))]), 3
    carried, numel = memory.MaskedMomentum(momentum=0.9, clip=20.0), slots[-1].stop
    configuration = Configuration.make("topk", {"ratio": 1.0}, granularity, memory=carried)
    world, u = LocalWorld(configuration, slots, 4), torch.zeros(numel)
    compressed = [slots[:2]] if norms == 1 else [[slot] for slot in slots[:2]]
    for step in range(rounds):
        generator = torch.Generator().manual_seed(step)
        gradients = [torch.randn(numel, generator=generator) * (1e-3 if rank == 2 else 1.0) for rank in range(4)]
        clipped = [each.clone() for each in gradients]
        for flat in clipped:
            for group in [*compressed, slots[2:]]:
                part = slice(group[0].offset, group[-1].stop)
                flat[part] *= (10 / flat[part].norm()).clamp(max=1)
        u = 0.9 * u + torch.stack(clipped).mean(0)
        world.average(gradients)
        torch.testing.assert_close(gradients[0], u)
        u[: slots[2].offset] = 0  # all of it went out


def test_no_memory_keeps_what_is_not_finite() -> None:
    slots = flat_slots([("weight", SHAPE)])
    block = Block.cut(slots, Granularity("layer"))
    for name in memory.names():
        store = Store(torch.device("cpu"))
        feedback = memory.parse(name).feedback(store, "residual", slots, 2000)
        bad = gradient(0).flatten()
        bad[7] = torch.nan
        admitted = feedback.before_encode(block, bad)
        assert not admitted.isfinite().all(), name
        feedback.after_encode(block, bad)
        feedback.after_decode(block, bad.clone())
        for tensors in store.state().values():
            assert tensors["weight"].isfinite().all(), name


@pytest.mark.parametrize("broken", [False, True])
def test_what_was_not_sent_of_chosen_values_is_left(broken: bool) -> None:
    """Values that came out as NaN count as not sent, and their velocity stays, too; infinite ones are forgotten."""
    block = Block.cut(flat_slots([("a", (30, 20)), ("b", (17,))]), Granularity("layer"))
    store = Store(torch.device("cpu"))
    feedback = memory.MaskedMomentum().feedback(store, "residual", block.slots, 617)
    noise = torch.Generator().manual_seed(3)
    feedback.residual.normal_(generator=noise)
    feedback.velocity.normal_(generator=noise)
    before, velocity = feedback.residual.clone(), feedback.velocity.clone()
    places = torch.randperm(617, generator=noise)[:300].sort().values
    positions = torch.where(places < 600, places, places - 600 + int(block.runs[1, 2]))
    sent = before[places].half().float()
    if broken:
        sent[::7], sent[3] = float("inf"), float("nan")
    feedback.leave(block, positions, before[places], sent)
    went = ~sent.isnan()
    expected = before.clone()
    expected[places[went]] = torch.where(sent.isinf(), 0.0, before[places] - sent)[went]
    assert torch.equal(feedback.residual, expected)
    velocity[places[went]] = 0
    assert torch.equal(feedback.velocity, velocity)


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


@pytest.mark.parametrize("owner", [None, "qsgd:8"])
@pytest.mark.parametrize("route", ["gather", "sharded"])
def test_the_gradients_weight_counts_once_whoever_compresses_again(route: str, owner: str | None) -> None:
    carried, slots = memory.Residual(gamma=0.5), flat_slots([("weight", (20, 30))])
    policy = DensePolicy(below=0, vectors=False)
    chosen = Configuration.make("topk", {"ratio": 1.0}, route=route, memory=carried, owner=owner, dense=policy)
    world, mean, total = LocalWorld(chosen, slots, 2), torch.randn(600), torch.zeros(600)
    for _ in range(20):
        gradients = [mean - 1, mean + 1]
        world.average(gradients)
        total += gradients[0] / 20
    torch.testing.assert_close(total, 0.5 * mean, rtol=0, atol=1e-2)


@pytest.mark.parametrize("reset", [-1, 2.5, float("nan")])
def test_a_new_start_every_so_many_steps_is_a_whole_number_of_them(reset: float) -> None:
    with pytest.raises(gradwire.ConfigurationError, match=f"reset={reset} is out of range; choose a whole number"):
        memory.LowPass(reset=reset)  # type: ignore[arg-type]


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
    found = pool.run(1, averages_with, "loco", 6, True, {"granularity": "block:64"})[0]
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
    return gradwire.roundtrip(values, "qgz", granularity="block:64").decoded
