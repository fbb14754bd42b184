"""Periodic averaging: local steps, then an average of what they changed, by its laws."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gradwire
from pool import Pool

Optimizer = torch.optim.Optimizer


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 30), nn.Tanh(), nn.Linear(30, 5))


def train(net: nn.Module, optimizer: Optimizer, steps: range) -> None:
    """Local steps, each rank on data of its own."""
    for step in steps:
        noise = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
        optimizer.zero_grad()
        net(torch.randn(16, 20, generator=noise)).square().sum().backward()
        optimizer.step()


def sgd(net: nn.Module, **options: Any) -> Optimizer:
    return torch.optim.SGD(net.parameters(), **{"lr": 0.01, **options})


def flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1).float() for parameter in net.parameters()])


def gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.contiguous())
    return found


def same_everywhere(tensor: torch.Tensor) -> bool:
    return all(torch.equal(each, tensor) for each in gathered(tensor))


def nesterov(parameters: list[torch.Tensor]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def pqasgd_by_hand() -> None:
    net = network()
    optimizer = sgd(net)
    handle = gradwire.periodic(optimizer, every=4, method="qsgd", bits=4, parameters=net.named_parameters())
    last = flat(net)
    for period in range(3):
        train(net, optimizer, range(4 * period, 4 * period + 3))
        assert not same_everywhere(flat(net))
        train(net, optimizer, range(4 * period + 3, 4 * period + 4))
        assert same_everywhere(flat(net))
        assert not torch.equal(flat(net), last)
        last = flat(net)
    assert (handle.steps_done, handle.syncs, handle.stats().steps) == (12, 3, 12)
    handle.close()


def test_pqasgd(pool: Pool) -> None:
    for workers in (2, 3):
        pool.run(workers, pqasgd_by_hand)
