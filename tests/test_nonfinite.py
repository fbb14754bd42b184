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
from gradwire import methods
from gradwire.train import synchronizer
from pool import Pool
from test_ddp import batch, flat, network
from test_laws import gradient, parameters

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
    named, usual = parameters(), synchronizer.BUCKET_ELEMENTS
    synchronizer.BUCKET_ELEMENTS = 3000
    try:
        return named, gradwire.Synchronizer(named, case.method, **case.arguments, **options)
    finally:
        synchronizer.BUCKET_ELEMENTS = usual


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
    chosen = [(case, [BAD[(number + k * 7) % len(BAD)] for k in range(3)]) for number, case in enumerate(cases())]
    pool.run(2, bad_steps_leave_nothing, chosen)


def memories_survive_overflow(chosen: list[Case]) -> None:
    """Finite gradients so large that means, sums and compensated values overflow."""
    for number, case in enumerate(chosen):
        named, sync = attach(case, rollback=bool(number % 2))
        for step in range(3):
            before, sign = bits(sync), (-1) ** (dist.get_rank() * (step // 2))
            for name, parameter in named:
                parameter.grad = gradient(name, dist.get_rank(), step).sign() * sign * HUGE
            sync.synchronize()
            finite = all(bool(parameter.grad.isfinite().all()) for _, parameter in named if parameter.grad is not None)
            if number % 2 and not finite:
                assert bits(sync) == before, (str(case), step)
        for field, tensors in sync.state_dict()["tensors"].items():
            for name, tensor in tensors.items():
                assert tensor.isfinite().all(), (str(case), field, name)
        sync.close()


def test_an_overflow_stays_out_of_memories(pool: Pool) -> None:
    pool.run(2, memories_survive_overflow, [case for case in cases() if case.memory != "none"][::2])
