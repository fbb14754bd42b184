"""Local steps on small models, and what ranks have to compare."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

Optimizer = torch.optim.Optimizer


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 30), nn.Tanh(), nn.Linear(30, 5))


def train(net: nn.Module, optimizer: Optimizer, steps: range, data: int | None = None) -> None:
    """Local steps on data of some rank; each on its own if None."""
    for step in steps:
        noise = torch.Generator().manual_seed(1000 * (dist.get_rank() if data is None else data) + step)
        optimizer.zero_grad()
        net(torch.randn(16, 20, generator=noise)).square().sum().backward()
        optimizer.step()


def backward(net: nn.Module, step: int, scale: float = 1.0) -> None:
    """Gradients of a rank's own, which :func:`train` has, too."""
    noise = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    net.zero_grad()
    (scale * net(torch.randn(16, 20, generator=noise)).square().sum()).backward()


def sgd(net: nn.Module, **options: Any) -> Optimizer:
    return torch.optim.SGD(net.parameters(), **{"lr": 0.01, **options})


def nesterov(parameters: list[torch.Tensor]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def eager_nesterov(parameters: list[torch.Tensor]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.4, momentum=0.9, nesterov=True)


class ByHand:
    """Streaming DiLoCo in plain torch: fragments are lists of parameters, averages dense."""

    def __init__(self, groups: list[list[nn.Parameter]], every: int, delay: int, mix: float) -> None:
        self.groups, self.every, self.delay, self.mix = groups, every, delay, mix
        self.shared = [[each.detach().clone() for each in group] for group in groups]
        self.outers = [nesterov(group) for group in self.shared]
        self.flights: list[tuple[int, int, list[torch.Tensor]]] = []

    @torch.no_grad()
    def after(self, step: int) -> None:
        for number, group in enumerate(self.groups):
            if step % self.every == (number + 1) * self.every // len(self.groups) % self.every:
                changes = [old - each for old, each in zip(self.shared[number], group, strict=True)]
                for change in changes:
                    dist.all_reduce(change)
                    change /= dist.get_world_size()
                self.flights.append((step + self.delay, number, changes))
        for due, number, changes in list(self.flights):
            if due == step:
                self.flights.remove((due, number, changes))
                for old, change in zip(self.shared[number], changes, strict=True):
                    old.grad = change
                self.outers[number].step()
                for old, each in zip(self.shared[number], self.groups[number], strict=True):
                    each.copy_((1 - self.mix) * each + self.mix * old)


def loss(net: nn.Module) -> float:
    inputs = torch.randn(64, 20, generator=torch.Generator().manual_seed(7))
    return float(net(inputs).detach().square().mean())
