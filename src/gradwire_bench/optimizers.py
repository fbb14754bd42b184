"""What takes the averages for gradients in the benchmarks' trainings, and at which learning rates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from gradwire.errors import ConfigurationError
from gradwire_bench.workloads import Workload

OptimizerName = Literal["sgd", "momentum", "nesterov", "adamw", "muon"]

WARM_UP_SHARE = 0.2
"""Share of the steps over which the learning rate rises; then it falls along a cosine."""


def base_rate(workload: Workload, optimizer: OptimizerName) -> float:
    """The learning rate that dense averages begin with; a momentum of 0.9 makes a step ten times as long."""
    if optimizer in ("adamw", "muon"):
        return workload.adam_rate
    return workload.learning_rate if optimizer == "sgd" else workload.learning_rate / 10


def optimizer_of(name: OptimizerName, net: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """What takes the averages for gradients."""
    if name == "muon":
        return MuonAndAdamW(net, learning_rate)
    if name == "adamw":
        return torch.optim.AdamW(net.parameters(), learning_rate)
    momentum = 0.0 if name == "sgd" else 0.9
    return torch.optim.SGD(net.parameters(), learning_rate, momentum=momentum, nesterov=name == "nesterov")


def one_cycle(optimizer: torch.optim.Optimizer, peak: float, steps: int) -> torch.optim.lr_scheduler.OneCycleLR:
    """The learning rate of a training: up to its peak, then down along a cosine."""
    warm_up = WARM_UP_SHARE * steps
    share = WARM_UP_SHARE if warm_up != 1 else 1.5 / steps  # torch divides by a warm-up's steps but one
    return torch.optim.lr_scheduler.OneCycleLR(
        optimizer, peak, total_steps=max(steps, 2), pct_start=share, cycle_momentum=False
    )


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) for hidden matrices, AdamW for all else, at one learning rate.

    Muon's steps are as long as AdamW's, as Liu et al. (2025, arXiv 2502.16982) have it. Embeddings and what makes the
    scores, the last part of a net, are no hidden matrices.

    Args:
        net: What it trains.
        learning_rate: Of both.

    Raises:
        ConfigurationError: If the net has none.
    """

    def __init__(self, net: nn.Module, learning_rate: float) -> None:
        *_, last = net.children()
        outer = {id(each) for part in (last, *_embeddings(net)) for each in part.parameters()}
        hidden = [each for each in net.parameters() if each.dim() == 2 and id(each) not in outer]
        if not hidden:
            raise ConfigurationError(f"{type(net).__name__} has no hidden matrix for Muon; take adamw")
        inside = {id(each) for each in hidden}
        others = [each for each in net.parameters() if id(each) not in inside]
        muon = torch.optim.Muon(hidden, learning_rate, adjust_lr_fn="match_rms_adamw")
        self._parts: tuple[torch.optim.Optimizer, ...] = (muon, torch.optim.AdamW(others, learning_rate))
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Takes the gradients."""
        for part in self._parts:
            part.step()


def _embeddings(net: nn.Module) -> list[nn.Module]:
    return [each for each in net.modules() if isinstance(each, nn.Embedding)]
