"""What handles leave behind, nothing, and what a profile shows of them."""

from __future__ import annotations

import gc
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import gradwire
from gradwire.wire import AllGather, Alone, Meter, Scheduler, Synchronization
from pool import Pool


def attached(way: str) -> tuple[nn.Module, gradwire.Handle]:
    net = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    if way == "ddp":
        model = DistributedDataParallel(net)
        return model, gradwire.compress(model, "efsignsgd")
    return net, gradwire.Synchronizer(net.named_parameters(), "efsignsgd")


def step(model: nn.Module, handle: gradwire.Handle) -> None:
    model(torch.ones(2, 40)).sum().backward()
    if isinstance(handle, gradwire.Synchronizer):
        handle.synchronize()


def open_things() -> tuple[int, int]:
    """This handle's threads and all file descriptors, once those that are about to end have ended."""
    gc.collect()
    threads = 0
    for _ in range(100):
        threads = sum(thread.name == "gradwire" for thread in threading.enumerate())
        if not threads:
            break
        time.sleep(0.05)
    return threads, len(os.listdir("/proc/self/fd"))


def use_and_leave() -> list[tuple[str, int, int]]:
    """Threads and descriptors after handles have been closed, forgotten, or closed after a failure."""
    found = []
    for number in range(3):
        for way in ("ddp", "synchronizer"):
            model, handle = attached(way)
            other_model, other = attached(way)
            for _ in range(2):
                step(model, handle)
                step(other_model, other)
            handle.close()
            handle.close()
            with pytest.raises(gradwire.GradwireError, match="attach again"):
                handle.wire.promise()
            dist.barrier()
            del model, handle, other_model, other
            found.append((f"{way} closed or forgotten {number}", *open_things()))
            dist.barrier()
            model, handle = attached(way)
            handle.wire._scheduler._transport = None  # type: ignore[assignment]
            with pytest.raises(AttributeError):
                step(model, handle)
            with pytest.raises(gradwire.GradwireError, match="an earlier step failed"):
                step(model, handle)
            dist.barrier()
            handle.close()
            del model, handle
            found.append((f"{way} failed {number}", *open_things()))
            dist.barrier()
    return found


def test_no_threads_and_no_descriptors_are_left(pool: Pool) -> None:
    for rank in pool.run(2, use_and_leave):
        assert all(threads == 0 for _, threads, _ in rank), rank
        assert len({descriptors for _, _, descriptors in rank}) == 1, rank


def test_a_profile_names_the_stages() -> None:
    def asks() -> Synchronization:
        yield AllGather(torch.zeros(8, dtype=torch.uint8))

    scheduler = Scheduler(Alone(), Meter(), fuse_bytes=1)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        scheduler.submit([asks()], lambda: None, last=True)
    names = {event.key for event in recorded.key_averages()}
    assert {"gradwire::encode", "gradwire::wire", "gradwire::decode"} <= names
