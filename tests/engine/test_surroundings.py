"""What a program sets for all of torch changes nothing of an average: not its bits, not what is sent."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire
from catalogue import Case, cases
from gradwire.engine.configuration import Configuration
from gradwire.layout import flat_slots
from gradwire.local.world import LocalWorld
from models import SHAPES, gradient
from pool import ranks


@contextmanager
def double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SURROUNDINGS = {
    "float64": double_by_default,
    "deterministic": deterministic,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "grad": torch.enable_grad,
    "another device": lambda: torch.device("meta"),  # as a program sets "cuda", where nothing is to be
}

GRADIENTS = [
    [torch.cat([gradient(name, rank, step).flatten() for name in SHAPES]) for rank in range(2)] for step in range(3)
]


def averages(case: Case) -> tuple[list[Tensor], int]:
    """What two workers hold after three steps, and what they sent."""
    slots = flat_slots(list(SHAPES.items()))
    world = LocalWorld(Configuration.make(case.method, case.options, *case.choices), slots, workers=2)
    results = []
    for step in range(3):
        buffers = [each.clone() for each in GRADIENTS[step]]
        world.average(buffers)
        results.extend(buffers)
    return results, world.engines[0].meter.wire_bytes


@pytest.mark.parametrize("case", {case.method: case for case in reversed(cases())}.values(), ids=str)
def test_surroundings_change_no_bit(case: Case) -> None:
    expected, sent = averages(case)
    for name, surroundings in SURROUNDINGS.items():
        with surroundings():
            found, found_sent = averages(case)
        assert found_sent == sent, name
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), name


@ranks(2)
def test_attached_where_another_device_is_usual() -> None:
    for method in ("topk", "powersgd", "deadzone", "efsignsgd"):
        ends = []
        for device in ("cpu", "meta"):
            torch.manual_seed(0)
            net, values = nn.Linear(48, 40), [inputs(step) for step in range(4)]
            with torch.device(device):
                sync = gradwire.Synchronizer(net, method, verify_every=1, audit_every=2, rollback=True)
                for each in values:
                    net.zero_grad()
                    net(each).square().mean().backward()
                    sync.synchronize()
                sync.load_state_dict(sync.state_dict())
                sync.close()
                averages = torch.cat([each.grad.flatten() for each in net.parameters() if each.grad is not None])
            ends.append(averages)
        assert torch.equal(*ends), method


@ranks(2)
def test_made_in_inference_mode() -> None:
    """What is made there, or averaged before an evaluation there, is written to by the steps that follow."""
    ends = []
    for usual in (nullcontext, torch.inference_mode):
        torch.manual_seed(0)
        nets = [nn.Sequential(nn.Linear(48, 40), nn.BatchNorm1d(40)) for _ in range(3)]
        sgd = torch.optim.SGD(nets[1].parameters(), lr=0.1, momentum=0.9)
        with usual():
            sync = gradwire.Synchronizer(nets[0], "topk", granularity="model", verify_every=1, audit_every=2)
            periodic = gradwire.periodic(sgd, every=2, moments="average", buffers=nets[1], outer=momentum)
            adam = gradwire.optim.OneBitAdam(nets[2].named_parameters(), freeze_step=1)
            decoded = gradwire.roundtrip(torch.ones(30, 40), "topk", ratio=0.5).decoded
        for step in range(5):
            for net, take in zip(nets, (sync.synchronize, sgd.step, adam.step), strict=True):
                net.zero_grad()
                net(inputs(step)).square().mean().backward()
                take()
            if step in (0, 2):
                with usual():
                    periodic.synchronize()
        for handle in (sync, periodic, adam):
            handle.close()
        ends.append(
            [decoded, *(each.grad for each in nets[0].parameters()), *nets[1].parameters(), *nets[2].parameters()]
        )
    assert all(torch.equal(*each) for each in zip(*ends, strict=True))


def momentum(anchors: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(anchors, lr=0.7, momentum=0.9)


def test_imported_where_another_device_is_usual() -> None:
    said = "import torch; torch.set_default_device('meta'); import gradwire; x = torch.ones(30, 40, device='cpu'); "
    said += "print(gradwire.roundtrip(x, 'topk', ratio=0.5).decoded.sum().item(), gradwire.check('topk').holds)"
    assert subprocess.run([sys.executable, "-c", said], capture_output=True, text=True).stdout == "600.0 True\n"


def inputs(step: int) -> Tensor:
    return torch.randn(16, 48, generator=torch.Generator().manual_seed(1000 * dist.get_rank() + step))
