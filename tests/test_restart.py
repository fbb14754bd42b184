"""A run that was stopped and goes on in new processes, models and handles gives the bits of one that was not."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from catalogue import OPTIONS, Case
from gradwire import methods
from pool import Pool
from test_ddp import batch, flat, network

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
    Case("qsgd", {"bits": 4}, "model", "sharded", "lowpass"),
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


@pytest.mark.parametrize("workers", [2, 3])
def test_a_run_goes_on_with_the_same_bits(pool: Pool, workers: int) -> None:
    pool.run(workers, all_stopped_and_not, [*ALL, *MORE], 3)


def test_before_buckets_are_rebuilt_too(pool: Pool) -> None:
    """One bucket then, three in the run that goes on: of two workers, the order of sums does not matter."""
    pool.run(2, all_stopped_and_not, LAYERS, 1)
    pool.run(2, all_stopped_and_not, LAYERS[:2], 0)
