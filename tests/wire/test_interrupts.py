"""An interrupt that a program survives: no rank goes on from half a step, or from one that not all of them took."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.attach import buckets
from gradwire.errors import GradwireError
from gradwire.local_sgd import fragments
from gradwire.wire import Wire
from pool import Pool

WAYS = ("synchronizer", "ddp", "periodic", "adam")


class InterruptedStepError(BaseException):
    """What a signal's handler raises; no Exception, just as KeyboardInterrupt is none."""


def training(way: str) -> tuple[Callable[[], None], list[Wire], Callable[[], None]]:
    """A step in several submissions, the wires that it goes through, and what removes it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 40))
    model: nn.Module = net
    sync: gradwire.Synchronizer | None = None
    optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if way == "adam":
        optimizer = adam = gradwire.optim.OneBitAdam(net.named_parameters(), freeze_step=1)
        wires, close = [adam._compressed.wire, adam._exact.wire], adam.close
    else:
        handle: gradwire.Handle
        if way == "ddp":
            model = wrapped = DistributedDataParallel(net, bucket_cap_mb=0.006)
            handle = gradwire.compress(wrapped, "efsignsgd", fuse_bytes=1)
        elif way == "periodic":
            handle = gradwire.periodic(optimizer, every=1, method="efsignsgd", fuse_bytes=1)
        else:
            handle = sync = gradwire.Synchronizer(net.named_parameters(), "efsignsgd", fuse_bytes=1)
        wires, close = [handle.wire], handle.close

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 32) * (1 + dist.get_rank())).square().mean().backward()
        if sync is not None:
            sync.synchronize()
        optimizer.step()

    return step, wires, close


def one_rank_is_interrupted(way: str, when: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "BUCKET_ELEMENTS", 1)
        patch.setattr(fragments, "STRETCH_ELEMENTS", 1)
        step, wires, close = training(way)
        for _ in range(3):
            step()
        dist.barrier()
        if dist.get_rank() == 0:
            with pytest.raises(InterruptedStepError):
                submitting(step, wires[0]) if when == "submitting" else waiting(step)
        else:
            if when == "waiting":
                time.sleep(1)
            with pytest.raises(gradwire.WireError, match="a worker ended or failed"):
                step()
        with pytest.raises(GradwireError, match="an earlier step failed, so this handle can do no more"):
            step()
        dist.barrier()
        close()


def submitting(step: Callable[[], None], wire: Wire) -> None:
    """Interrupts a step between its first submission and its second."""
    usual, count = wire.submit, 0

    def submit(*arguments: object) -> None:
        nonlocal count
        count += 1
        if count == 2:
            raise InterruptedStepError
        usual(*arguments)  # type: ignore[arg-type]

    wire.submit = submit  # type: ignore[method-assign, assignment]
    try:
        step()
    finally:
        wire.submit = usual  # type: ignore[method-assign]


def waiting(step: Callable[[], None]) -> None:
    """Interrupts a step by a signal, while it waits for the other rank."""

    def interrupt(*_: object) -> None:
        raise InterruptedStepError

    former = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        step()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_is_interrupted_while_it_is_submitted_fails(pool: Pool, way: str) -> None:
    pool.run(2, one_rank_is_interrupted, way, "submitting")


@pytest.mark.parametrize("way", [way for way in WAYS if way != "ddp"])
def test_a_step_that_is_interrupted_while_it_is_waited_for_fails_at_once(pool: Pool, way: str) -> None:
    """DDP waits within its backward pass, where no signal is handled."""
    pool.run(2, one_rank_is_interrupted, way, "waiting")
