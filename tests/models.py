"""A small network, what it trains on, and tensors shaped as the parameters of several kinds of layers."""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist
from torch import nn


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(48, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 80), nn.ReLU(), nn.Linear(80, 10)
    )


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(16, 48, generator=generator), torch.randint(10, (16,), generator=generator)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1).float() for parameter in model.parameters()])


def gathered(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, tensor.contiguous(), group=group)
    return found


def same_everywhere(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> bool:
    return all(torch.equal(each, tensor) for each in gathered(tensor, group))


SHAPES = {"conv": (16, 8, 3, 3), "linear": (40, 67), "bias": (40,), "tall": (300, 9), "odd": (1031,), "scalar": ()}


def parameters() -> list[tuple[str, nn.Parameter]]:
    return [(name, nn.Parameter(torch.zeros(shape))) for name, shape in SHAPES.items()]


def gradient(name: str, rank: int, step: int) -> torch.Tensor:
    return _drawn(name, rank, step).clone()


@cache
def _drawn(name: str, rank: int, step: int) -> torch.Tensor:
    seed = sum(map(ord, name)) * 1000 + rank * 100 + step
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
