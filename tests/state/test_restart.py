"""A run that was stopped and goes on in new processes, models and handles gives the bits of one that was not."""

from __future__ import annotations

import copy
import io
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from catalogue import OPTIONS, Case
from gradwire import methods
from gradwire.memory import EF21, Momentum
from models import batch, flat, network
from pool import FORKING, SECONDS, Pool, ranks

STEPS = 5


def usual(name: str) -> Case:
    """A method as its paper has it, with options that do something on small tensors."""
    kind = methods.get(name)
    scope = kind.granularities[0]
    return Case(name, OPTIONS.get(name, [{}])[0], scope, kind.routes[0], kind.memory)


ALL = [usual(name) for name in methods.names()]
MORE = [
    Case("topk", {"ratio": 0.1, "values": "qsgd:4"}, "bucket", "sharded", "residual"),
    Case("topk", {"ratio": 0.1}, "model", "gather", "dgc"),
    Case("topk", {"ratio": 0.1, "owner": "qsgd:8"}, "block:100", "gather", "lowpass"),
    Case("efsignsgd", {}, "block:100", "sharded", "residual"),
    Case("efsignsgd", {}, "bucket", "sharded", "ef21"),
    Case("efsignsgd", {}, "bucket", "sharded", Momentum(nesterov=True, memory=EF21())),
    Case("qsgd", {"bits": 4}, "model", "sharded", "lowpass"),
    Case("qsgd", {"bits": 4}, "layer", "sharded", "diana"),
    Case("qsgd", {"bits": 4}, "bucket", "gather", "residual"),
    Case("threshold", {"threshold": 0.5}, "bucket", "gather", "momentum"),
    Case("fp16", {}, "layer", "allreduce", "residual"),
    Case("oktopk", {"ratio": 0.3, "recut": 2}, "bucket", "regions", "residual"),
]
LAYERS = [case for case in ALL if case.method in ("dense", "efsignsgd", "topk", "powersgd", "acpsgd", "qsgd", "ef21")]


class Run:
    """A DDP model with small buckets, momentum SGD and a handle."""

    def __init__(self, case: Case, **ddp: Any) -> None:
        self.model = DistributedDataParallel(network(), bucket_cap_mb=0.02, **ddp)
        self.handle = gradwire.compress(self.model, case.method, **case.arguments)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def steps(self, steps: range) -> None:
        for step in steps:
            inputs, labels = batch(dist.get_rank(), step)
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(inputs), labels).backward()
            self.optimizer.step()

    def save(self) -> bytes:
        buffer = io.BytesIO()
        parts = self.model.state_dict(), self.optimizer.state_dict(), self.handle.state_dict()
        torch.save(parts, buffer)
        return buffer.getvalue()

    def load(self, saved: bytes) -> None:
        model, optimizer, handle = torch.load(io.BytesIO(saved), weights_only=True)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.handle.load_state_dict(handle)


def stopped_and_not(case: Case, stop: int, **ddp: Any) -> None:
    whole = Run(case, **ddp)
    whole.steps(range(stop))
    saved = whole.save()
    whole.steps(range(stop, STEPS))
    whole.handle.close()
    resumed = Run(case, **ddp)
    resumed.load(saved)
    resumed.steps(range(stop, STEPS))
    resumed.handle.close()
    assert resumed.handle.engine.step == STEPS
    assert torch.equal(flat(whole.model), flat(resumed.model)), (str(case), stop)


def all_stopped_and_not(chosen: list[Case], stop: int) -> None:
    for case in chosen:
        stopped_and_not(case, stop)


def test_a_run_goes_on_with_the_same_bits(pool: Pool) -> None:
    pool.run(3, all_stopped_and_not, [*ALL, *MORE], 3)


def test_before_buckets_are_rebuilt_too(pool: Pool) -> None:
    """One bucket then, three in the run that goes on: of two workers, the order of sums does not matter."""
    pool.run(2, all_stopped_and_not, LAYERS, 1)
    pool.run(2, all_stopped_and_not, LAYERS[:2], 0)


@ranks(3)
def test_ways_of_ddp() -> None:
    efsignsgd = Case("efsignsgd", {}, "bucket", "sharded", "residual")
    stopped_and_not(efsignsgd, 1, find_unused_parameters=True)
    stopped_and_not(efsignsgd, 3, static_graph=True)
    stopped_and_not(efsignsgd, 3, gradient_as_bucket_view=True)


def loaded_into_a_handle_that_has_trained(case: Case) -> None:
    """Loading puts a handle back, whatever it remembers: to after two steps, and to before the first one."""
    run = Run(case)
    start = run.save()
    run.steps(range(3))
    middle, found = run.save(), []
    for saved, first in ((middle, 3), (start, 0), (middle, 3), (start, 0)):
        run.load(saved)
        run.steps(range(first, STEPS))
        found.append(flat(run.model))
    run.handle.close()
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=1e-6 if case.granularity == "layer" else 0.1)
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


def all_loaded(chosen: list[Case]) -> None:
    for case in chosen:
        loaded_into_a_handle_that_has_trained(case)


def test_loading_puts_a_handle_back(pool: Pool) -> None:
    pool.run(2, all_loaded, LAYERS)


def synchronizer_stopped_and_not(chosen: list[Case]) -> None:
    for case in chosen:
        found = []
        for stop in (None, 1, 3):
            net = network()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
            sync = gradwire.Synchronizer(net.named_parameters(), case.method, **case.arguments)
            for step in range(STEPS):
                if step == stop:
                    state = sync.state_dict()
                    sync.close()
                    sync = gradwire.Synchronizer(net.named_parameters(), case.method, **case.arguments)
                    sync.load_state_dict(state)
                inputs, labels = batch(dist.get_rank(), step)
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(inputs), labels).backward()
                sync.synchronize()
                optimizer.step()
            sync.close()
            found.append(flat(net))
        assert torch.equal(found[0], found[1]), str(case)
        assert torch.equal(found[0], found[2]), str(case)


def test_a_synchronizer_goes_on_with_the_same_bits(pool: Pool) -> None:
    pool.run(3, synchronizer_stopped_and_not, [*LAYERS[::2], *MORE[:4]])


def in_one_checkpoint(folder: str) -> None:
    case = Case("qsgd", {"bits": 4}, "layer", "sharded", "residual")
    whole, again = Run(case), Run(case)
    whole.steps(range(3))
    parts = {"model": whole.model, "gradwire": gradwire.PerRank(whole.handle)}
    dcp.save(parts, checkpoint_id=folder)
    again.optimizer.load_state_dict(copy.deepcopy(whole.optimizer.state_dict()))
    dcp.load({"model": again.model, "gradwire": gradwire.PerRank(again.handle)}, checkpoint_id=folder)
    whole.steps(range(3, STEPS))
    again.steps(range(3, STEPS))
    assert torch.equal(flat(whole.model), flat(again.model))
    with pytest.raises(gradwire.ConfigurationError, match=r"no state of rank \d; it has others"):
        gradwire.PerRank(again.handle).load_state_dict({"others": b""})
    whole.handle.close()
    again.handle.close()


@pytest.mark.parametrize("workers", [2, 4])
def test_states_of_all_ranks_in_one_distributed_checkpoint(pool: Pool, tmp_path: Path, workers: int) -> None:
    pool.run(workers, in_one_checkpoint, str(tmp_path))


@ranks(2)
def test_no_state_is_taken_during_a_step() -> None:
    """Half a step is no state: it is neither given nor overwritten; after it, all is as usual."""
    run = Run(LAYERS[1])
    run.steps(range(2))
    state = run.handle.state_dict()
    met: list[str] = []

    def try_it(_: torch.Tensor) -> None:
        for attempt in (run.handle.state_dict, lambda: run.handle.load_state_dict(state)):
            with pytest.raises(gradwire.GradwireError, match="a step is under way"):
                attempt()
            met.append("refused")

    first = next(run.model.module.parameters())  # whose gradient comes last
    hook = first.register_hook(try_it)
    run.steps(range(2, 3))
    hook.remove()
    assert len(met) == 2
    assert run.handle.state_dict()["step"] == 3
    run.steps(range(3, STEPS))
    run.handle.close()


KILLED = [
    Case("efsignsgd", {}, "bucket", "sharded", "residual"),
    Case("topk", {"ratio": 0.1}, "layer", "gather", "dgc"),
    Case("powersgd", {"rank": 2}, "layer", "allreduce", "residual"),
]


def life(rank: int, workers: int, folder: str, first: int) -> None:
    """Trains until it is killed, saving after each step; from step ``first`` on it trains to the end."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/world-{first}", rank=rank, world_size=workers)
    runs = [Run(case) for case in KILLED]
    if first:
        for number, run in enumerate(runs):
            run.load(Path(f"{folder}/{number}-{first}-{rank}").read_bytes())
    for step in range(first, STEPS if first else 10**9):
        for number, run in enumerate(runs):
            run.steps(range(step, step + 1))
            path = Path(f"{folder}/{number}-{step + 1}-{rank}")
            path.with_suffix(".part").write_bytes(run.save())
            path.with_suffix(".part").rename(path)
        dist.barrier()


def test_killed_and_started_again(pool: Pool, tmp_path: Path) -> None:
    """All processes of a run are killed at some moment; new ones go on from the files with the same bits."""
    workers = 2

    def start(first: int) -> list[Any]:
        processes = [
            FORKING.Process(target=life, args=(rank, workers, str(tmp_path), first)) for rank in range(workers)
        ]
        for process in processes:
            process.start()
        return processes

    doomed = start(0)
    last = [tmp_path / f"{len(KILLED) - 1}-{STEPS}-{rank}" for rank in range(workers)]
    deadline = time.monotonic() + SECONDS
    while not all(path.exists() for path in last) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in doomed:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    expected = {path.name: torch.load(path, weights_only=True)[0] for path in tmp_path.glob(f"*-{STEPS}-?")}
    assert len(expected) == len(KILLED) * workers
    for name in expected:
        (tmp_path / name).unlink()
    for process in start(2):
        process.join(SECONDS)
        assert process.exitcode == 0
    for name, weights in expected.items():
        again = torch.load(tmp_path / name, weights_only=True)[0]
        assert all(torch.equal(value, again[key]) for key, value in weights.items()), name
