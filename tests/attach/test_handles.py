"""What handles leave behind, nothing, and what a profile shows of them."""

from __future__ import annotations

import atexit
import copy
import gc
import os
import pickle
import signal
import threading
import time
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import gradwire
from gradwire.wire import AllGather, Meter, Scheduler, Synchronization, local_transports
from pool import Pool, ranks
from sharded import hsdp, loss


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
    threads, ending = 0, -1
    for _ in range(100):
        gc.collect()
        threads = sum(thread.name == "gradwire" for thread in threading.enumerate())
        if not threads and gloo_threads() == ending:
            break
        ending = gloo_threads()
        time.sleep(0.05)
    return threads, len(os.listdir("/proc/self/fd"))


def gloo_threads() -> int:
    names = [Path(f"/proc/self/task/{thread}/comm").read_text() for thread in os.listdir("/proc/self/task")]
    return sum("gloo" in name for name in names)


@ranks(2)
def test_a_closed_handle_keeps_no_threads_of_the_backend() -> None:
    open_things()  # what earlier tests left ends
    dist.barrier()
    before = gloo_threads()
    handles = [attached("synchronizer") for _ in range(2)]
    for net, handle in handles:
        step(net, handle)
    assert gloo_threads() > before
    for _, handle in handles:
        handle.close()
    assert gloo_threads() == before
    dist.barrier()


@ranks(2)
def test_what_is_refused_keeps_no_threads_of_the_backend() -> None:
    open_things()
    dist.barrier()
    before = gloo_threads()
    for differ in ({"ratio": 0.1 + 0.1 * dist.get_rank()}, {}):  # options, then parameters
        net = nn.Linear(40, 60)
        nn.init.constant_(net.weight, float(dist.get_rank()))
        with pytest.raises(gradwire.ConfigurationError, match=r"differ|other values on rank"):
            gradwire.Synchronizer(net, "topk", **differ)
    assert gloo_threads() == before
    dist.barrier()


@ranks(4)
def test_a_closed_handle_of_shards_keeps_no_threads_of_the_backend() -> None:
    """With a rollback those who hold other shards are asked, too."""
    open_things()  # what earlier tests left ends
    dist.barrier()
    counts = []
    for rollback in (False, True):
        model = hsdp()
        handle = gradwire.compress(model, "topk", rollback=rollback)
        loss(model, 0).backward()
        handle.close()
        counts.append(gloo_threads())
        dist.barrier()
    assert counts[0] == counts[1]


@ranks(1)
def test_handles_outlive_the_process_groups() -> None:
    """What belongs to a world that is gone can still be closed."""
    net, handle = attached("synchronizer")
    step(net, handle)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    handle.close()
    net, later = attached("synchronizer")
    step(net, later)
    later.close()


@ranks(1)
def test_no_handle_goes_on_after_the_process_groups() -> None:
    for way in ("synchronizer", "ddp"):
        net, handle = attached(way)
        step(net, handle)
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        for message in ("the process group was destroyed, and this handle's with it", "an earlier step failed"):
            with pytest.raises(gradwire.GradwireError, match=message):
                step(net, handle)
        handle.close()


def exit_in_a_fork() -> tuple[int, str]:
    """How a process that was forked ends, the way ``multiprocessing`` ends it, and what went wrong in it."""
    net, handle = attached("synchronizer")
    step(net, handle)
    gc.collect()  # groups of earlier tests, for whose threads the child would wait
    ours, childs = os.pipe()
    if not (child := os.fork()):
        code = 1
        try:
            with pytest.raises(gradwire.GradwireError, match="attach again"):
                handle.synchronize()  # torch itself may refuse a backward pass here
            handle.state_dict()
            del handle
            gc.collect()
            code = 0
        except BaseException:
            os.write(childs, traceback.format_exc().encode())
        finally:
            atexit._run_exitfuncs()
            os._exit(code)
    os.close(childs)
    status = 0
    for _ in range(600):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.05)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise AssertionError("the child hangs")
    step(net, handle)
    handle.close()
    with os.fdopen(ours) as said:
        return os.waitstatus_to_exitcode(status), said.read()


def test_a_process_that_was_forked_ends(pool: Pool) -> None:
    assert pool.run(2, exit_in_a_fork) == [(0, "")] * 2


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

    scheduler = Scheduler(*local_transports(1), Meter(), fuse_bytes=1)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        scheduler.submit([asks()], lambda: None, last=True)
    names = {event.key for event in recorded.key_averages()}
    assert {"gradwire::encode", "gradwire::wire", "gradwire::decode"} <= names


@pytest.mark.parametrize("way", ["ddp", "own loop"])
@ranks(1)
def test_a_handle_that_is_saved_or_copied_says_what_to_save(way: str) -> None:
    _, handle = attached(way)
    for kept in (pickle.dumps, copy.deepcopy):
        with pytest.raises(pickle.PicklingError, match=r"save its state_dict\(\), and attach anew"):
            kept(handle)
    handle.close()
