"""A model that is trained under DDP with a method attached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
import models
from models import flat, same_everywhere

# A linear, a sparse, a low-rank and a quantising method, with and without memories, on all routes and scopes.
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("dense", {}),
    ("topk", {"ratio": 0.05}),
    ("acpsgd", {"rank": 2}),
    ("efsignsgd", {"route": "sharded"}),
    ("qsgd", {"bits": 8, "granularity": "model"}),
]


class Run:
    """A DDP model of several buckets whose parameters stay, and the averages it brings."""

    def __init__(self, method: Any, **choices: Any) -> None:
        self.model = DistributedDataParallel(models.network(), bucket_cap_mb=0.02)
        self.handle = gradwire.compress(self.model, method, **choices)

    def step(self, number: int) -> torch.Tensor:
        inputs, labels = models.batch(dist.get_rank(), number)
        self.model.zero_grad()
        nn.functional.cross_entropy(self.model.eval()(inputs), labels).backward()
        return torch.cat([each.grad.view(-1) for each in self.model.parameters() if each.grad is not None])


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(48, 96), nn.ReLU(), nn.Linear(96, 80), nn.ReLU(), nn.Linear(80, 10))


def inputs(step: int, rows: int = 16) -> torch.Tensor:
    return torch.randn(rows, 48, generator=torch.Generator().manual_seed(1000 * dist.get_rank() + step))


class Trained:
    """A model in several buckets, its handle and optimizer."""

    def __init__(self, net: nn.Module, method: str = "topk", *, cap: float = 0.02, **arguments: Any) -> None:
        options = {} if method != "topk" else {"ratio": 0.05}
        ddp = {key: arguments.pop(key) for key in list(arguments) if key in DDP_ARGUMENTS}
        self.model = DistributedDataParallel(net, bucket_cap_mb=cap, **ddp)  # type: ignore[arg-type]
        self.handle = gradwire.compress(self.model, method, **(options | arguments))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def step(self, *losses: Callable[[], torch.Tensor]) -> None:
        """One optimizer step; all but the last loss are accumulated without synchronisation."""
        self.optimizer.zero_grad()
        with self.model.no_sync():
            for loss in losses[:-1]:
                loss().backward()
        losses[-1]().backward()
        self.optimizer.step()

    def end(self, steps: int, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        assert self.handle.stats().steps == steps
        weights = flat(self.model)
        assert weights.isfinite().all()
        assert same_everywhere(weights, group)
        self.handle.close()
        return weights


DDP_ARGUMENTS = ("gradient_as_bucket_view", "find_unused_parameters", "static_graph", "process_group")


def mean_square(
    model: Any, step: int, *further: Any, rows: int = 16, weight: float = 1.0
) -> Callable[[], torch.Tensor]:
    return lambda: model(inputs(step, rows), *further).square().mean() * weight


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(48, 40), nn.Linear(48, 40)

    def forward(self, values: torch.Tensor, which: int) -> torch.Tensor:
        return (self.second if which else self.first)(values)  # type: ignore[no-any-return]
