"""A step that is not finite is seen as such on every rank, and with a rollback leaves no trace on any."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from catalogue import Case, cases
from flat_world import PLACES, SLOTS, gradients_of, world_of
from gradwire.attach import buckets
from gradwire.engine.guards.rollback import Rollback
from gradwire.local.world import LocalWorld
from models import batch, flat, gradient, network, parameters
from pool import Pool, ranks

INF = float("inf")
# In the last bucket, in the first one but dense by policy, and in the first one; on one worker, or on all of them.
BAD = list(product(("conv", "odd", "tall"), (INF, -INF, float("nan")), ("one", "all")))
HUGE = 3e38


def bits(handle: gradwire.Handle) -> dict[tuple[str, str], bytes]:
    tensors = handle.state_dict()["tensors"]
    return {
        (field, name): value.contiguous().view(-1).numpy().tobytes()
        for field, views in tensors.items()
        for name, value in views.items()
    }


def attach(case: Case, **options: Any) -> tuple[list[tuple[str, nn.Parameter]], gradwire.Synchronizer]:
    """With buckets of three thousand elements: two of them, one with several compressed parameters."""
    named, usual = parameters(), buckets.BUCKET_ELEMENTS
    buckets.BUCKET_ELEMENTS = 3000
    try:
        return named, gradwire.Synchronizer(named, case.method, **case.arguments, **options)
    finally:
        buckets.BUCKET_ELEMENTS = usual


def average(named: list[tuple[str, nn.Parameter]], sync: gradwire.Synchronizer, step: int, bad: Any = None) -> bool:
    """One step, in which one or all workers have one bad value; whether all averages are finite."""
    for name, parameter in named:
        parameter.grad = gradient(name, dist.get_rank(), step)
        if bad is not None and name == bad[0] and (bad[2] == "all" or dist.get_rank() == 1):
            parameter.grad.view(-1)[step % parameter.numel()] = bad[1]
    sync.synchronize()
    return all(bool(parameter.grad.isfinite().all()) for _, parameter in named if parameter.grad is not None)


def bad_steps_leave_nothing(chosen: list[tuple[Case, list[Any]]]) -> None:
    for case, bad in chosen:
        named, sync = attach(case, rollback=True)
        for step, which in enumerate([*bad[:1], None, *bad[1:]]):
            before, count = bits(sync), sync.engine.step
            finite = average(named, sync, step, which)
            assert finite == (which is None), (str(case), step, which)
            if which is None:
                assert sync.engine.step == count + 1
                continue
            assert bits(sync) == before, (str(case), step, which)
            assert sync.engine.step == count
        sync.close()


def test_a_bad_step_is_bad_on_every_rank_and_leaves_nothing(pool: Pool) -> None:
    """Some attachments, of several buckets, each with three of the eighteen ways to be bad."""
    pool.run(2, bad_steps_leave_nothing, [(case, ways(number)) for number, case in enumerate(cases()[::15])])


def ways(number: int) -> list[Any]:
    return [BAD[(number + k * 7) % len(BAD)] for k in range(3)]


def world_with_a_rollback(case: Case) -> LocalWorld:
    world = world_of(case, 2)
    for engine in world.engines:
        engine.guards.append(Rollback(engine, {slot.name: torch.float32 for slot in SLOTS}))
    return world


def remembered(world: LocalWorld) -> list[dict[tuple[str, str], bytes]]:
    return [
        {
            (field, name): tensor.contiguous().view(-1).numpy().tobytes()
            for field, tensors in engine.store.state().items()
            for name, tensor in tensors.items()
        }
        for engine in world.engines
    ]


def test_a_bad_step_of_any_attachment_leaves_nothing() -> None:
    """In one process, every third of all."""
    for number, case in enumerate(cases()[::3]):
        world, bad = world_with_a_rollback(case), ways(number)
        for step, which in enumerate([*bad[:1], None, *bad[1:]]):
            before, gradients = remembered(world), gradients_of(2, step)
            if which is not None:
                for gradient_of_rank in gradients[0 if which[2] == "all" else 1 :]:
                    place = gradient_of_rank[PLACES[which[0]]]
                    place[step % len(place)] = which[1]
            world.average(gradients)
            for average_of_rank in gradients:
                assert bool(average_of_rank.isfinite().all()) == (which is None), (str(case), step, which)
            assert which is None or remembered(world) == before, (str(case), step, which)


def test_an_overflow_stays_out_of_memories() -> None:
    """Finite gradients so large that means, sums and compensated values overflow."""
    for number, case in enumerate([case for case in cases() if case.memory != "none"][::3]):
        world = world_with_a_rollback(case) if number % 2 else world_of(case, 2)
        for step in range(3):
            before, gradients = remembered(world), gradients_of(2, step)
            for rank, gradient_of_rank in enumerate(gradients):
                gradient_of_rank.copy_(gradient_of_rank.sign() * (-1) ** (rank * (step // 2)) * HUGE)
            world.average(gradients)
            if number % 2 and not gradients[0].isfinite().all():
                assert remembered(world) == before, (str(case), step)
        for engine in world.engines:
            for field, tensors in engine.store.state().items():
                for name, tensor in tensors.items():
                    assert tensor.isfinite().all(), (str(case), field, name)


TRAINED: list[tuple[str, dict[str, Any]]] = [
    ("efsignsgd", {}),
    ("topk", {"ratio": 0.1, "granularity": "model"}),
    ("qsgd", {"memory": "ef21"}),
    ("powersgd", {"rank": 2}),
    ("acpsgd", {"rank": 2}),
    ("threshold", {"threshold": 0.01, "capacity": 1.0}),  # room is shared by a bucket
    ("dgc", {"ratio": 0.1, "warmup": 3}),
    ("gradiveq", {"slice": 32, "rank": 5, "learn_steps": 2, "use_steps": 2}),
    ("demo", {"topk": 3}),
    ("dion", {}),
    ("inceptionn", {}),
    ("gaussiank", {"ratio": 0.1}),
    ("sidco", {"ratio": 0.1}),
]


def trained(bad: set[int], method: str, options: dict[str, Any]) -> torch.Tensor:
    """Six good steps; before some of them one whose last layer's, or whose every gradient is not finite on rank 1."""
    model = DistributedDataParallel(network(), bucket_cap_mb=0.02)
    handle = gradwire.compress(model, method, rollback=True, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(6):
        for poison in [INF, None] if step in bad else [None]:
            inputs, labels = batch(dist.get_rank(), step)
            if poison is not None and dist.get_rank() == 1:
                inputs[0] = poison
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            finite = all(bool(each.grad.isfinite().all()) for each in model.parameters() if each.grad is not None)
            assert finite == (poison is None)
            if finite:
                optimizer.step()
    assert handle.engine.step == 6
    handle.close()
    return flat(model)


@ranks(2)
def test_training_goes_on_as_if_bad_steps_had_not_been() -> None:
    for method, options in TRAINED:
        assert torch.equal(trained(set(), method, options), trained({0, 1, 4}, method, options)), method


@ranks(2)
def test_a_bad_step_goes_back_to_what_was_loaded() -> None:
    """A state loaded between steps, with another layout or before the first step, is what a bad step goes back to."""
    for case in (
        Case("topk", {"ratio": 0.1}, "layer", "sharded", "residual"),
        Case("inceptionn", {}, "layer", "gather"),
    ):
        named, sync = attach(case, rollback=True)
        average(named, sync, 0)
        saved, expected = sync.state_dict(), bits(sync)
        average(named, sync, 1)
        sync.load_state_dict(saved)
        average(named, sync, 1, BAD[0])
        assert bits(sync) == expected
        sync.close()
        named, sync = attach(case, rollback=True)
        sync.load_state_dict(saved)
        average(named, sync, 1, BAD[0])
        assert bits(sync) == expected
        assert sync.engine.step == 1
        sync.close()


def squares_are_forgotten() -> list[bytes]:
    found = []
    for bad in (False, True):
        named = parameters()
        dense = gradwire.DensePolicy(below=0, vectors=False)
        handle = gradwire.Synchronizer(named, "variance", moments="microbatches", rollback=True, dense=dense, alpha=0.5)
        module = nn.ParameterDict(dict(named))
        gradwire.SecondMoments(module, handle, per="microbatches")
        for step in range(4):
            for poison in [INF, 1.0] if bad and step in (0, 2) else [1.0]:
                for _, parameter in named:
                    parameter.grad = None
                for part in range(2):
                    sum(
                        (each * gradient(name, dist.get_rank(), 2 * step + part) * poison).sum() for name, each in named
                    ).backward()
                handle.synchronize()
        found.append(b"".join(bits(handle).values()))
        handle.close()
    return found


def test_squares_of_a_bad_step_are_forgotten(pool: Pool) -> None:
    for with_bad, without in pool.run(2, squares_are_forgotten):
        assert with_bad == without


@ranks(2)
def test_an_average_beyond_the_parameters_range_is_not_finite() -> None:
    """Compensated values grow beyond the range of half-precision parameters, though not of float32."""
    for dtype, granularity, share in (
        (torch.float16, "layer", 0.75),
        (torch.float16, "model", 0.75),
        (torch.bfloat16, "layer", 0.4),
    ):
        named = [("full", nn.Parameter(torch.zeros(64, 32))), ("half", nn.Parameter(torch.zeros(64, 32, dtype=dtype)))]
        sync = gradwire.Synchronizer(named, "topk", ratio=0.5, granularity=granularity, rollback=True)
        seen = []
        for _ in range(3):
            before = bits(sync)
            for _, parameter in named:
                parameter.grad = torch.full_like(parameter, torch.finfo(dtype).max * share)
            sync.synchronize()
            seen.append(all(bool(parameter.grad.isfinite().all()) for _, parameter in named))
            assert (bits(sync) == before) == (not seen[-1])
        assert seen == [True, False, False], (dtype, granularity, seen)
        sync.close()


@ranks(2)
def test_estimates_that_would_part_are_taken_back_unasked() -> None:
    """EF21's estimates would part company for good; of other memories nobody pays for a copy who did not ask for it."""
    for method, options, rolls_back in (("ef21", {}, True), ("qsgd", {"memory": "ef21"}, True), ("topk", {}, False)):
        named = parameters()
        sync = gradwire.Synchronizer(named, method, **options)
        assert any(isinstance(guard, Rollback) for guard in sync.engine.guards) == rolls_back, method
        average(named, sync, 0)
        before = bits(sync)
        assert not average(named, sync, 1, BAD[0])
        assert (bits(sync) == before) == rolls_back, method
        sync.close()


@ranks(1)
def test_rollback_is_checked() -> None:
    with pytest.raises(gradwire.ConfigurationError, match=r"rollback='yes' is not known; choose True, False, or None"):
        gradwire.Synchronizer(parameters(), "topk", rollback="yes")
