"""Models that FSDP2 has sharded, what they train on, and what ranks have to compare. For worlds of four."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class Net(nn.Module):
    """Parts of several sizes; 129 and 5 rows do not go into two shards evenly, and of one row a rank has nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(48, 129)
        self.norm = nn.LayerNorm(129)
        self.second = nn.Sequential(nn.Linear(129, 80), nn.Tanh(), nn.Linear(80, 40))
        self.scale = nn.Parameter(torch.ones(1, 40))
        self.last = nn.Linear(40, 5)
        self.scaled = True

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.second(torch.tanh(self.norm(self.first(inputs))))
        return self.last(hidden * self.scale if self.scaled else hidden)


def inputs(step: int, rank: int | None = None) -> Tensor:
    of_rank = dist.get_rank() if rank is None else rank
    return torch.randn(8, 48, generator=torch.Generator().manual_seed(1000 * of_rank + step))


def loss(model: nn.Module, step: int) -> Tensor:
    return model(inputs(step)).float().square().mean()


_numbers = count()


@lru_cache(maxsize=4)
def _mesh(world: dist.ProcessGroup, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    mesh._thread_id = next(_numbers)  # equals no mesh of a world before, with whose groups torch's caches would go on
    return mesh


def hybrid(of: str = "") -> DeviceMesh:
    """Two replicas of two shards; another mesh for every word."""
    assert dist.group.WORLD is not None
    return _mesh(dist.group.WORLD, (2, 2), (f"replicate{of}", f"shard{of}"))


@lru_cache(maxsize=4)
def _replicas(world: dist.ProcessGroup) -> dist.ProcessGroup:
    return hybrid()["replicate"].get_group()


def replicas() -> dist.ProcessGroup:
    """Those that have the same shard of :func:`hybrid`; slicing a mesh takes as long as a step."""
    assert dist.group.WORLD is not None
    return _replicas(dist.group.WORLD)


def in_four() -> DeviceMesh:
    """One replica of four shards."""
    assert dist.group.WORLD is not None
    return _mesh(dist.group.WORLD, (1, 4), ("once", "fourth"))


def everyone() -> DeviceMesh:
    assert dist.group.WORLD is not None
    return _mesh(dist.group.WORLD, (4,), ("all",))


def hsdp(net: nn.Module | None = None, mesh: DeviceMesh | None = None, **arguments: Any) -> Any:
    """A model in four parameter groups, over two replicas of two shards."""
    from torch.distributed.fsdp import fully_shard  # seconds

    net = Net() if net is None else net
    for part in (net.first, net.second, net.last):
        fully_shard(part, mesh=mesh or hybrid(), **arguments)
    return fully_shard(net, mesh=mesh or hybrid(), **arguments)


def replicated(net: nn.Module | None = None) -> Any:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    net = Net() if net is None else net
    for part in (net.first, net.second):
        replicate(part, mesh=everyone())
    return replicate(net, mesh=everyone())


def divided(model: Any, factor: float) -> Any:
    """Has sums over shards and replicas, divided by a factor; over shards FSDP needs their number for that on gloo."""
    from torch.distributed.fsdp import FSDPModule

    for each in model.modules():
        if isinstance(each, FSDPModule):
            each.set_gradient_divide_factor(factor)
    return model


def fsdp_has(name: str) -> bool:
    """Whether FSDP2 of this torch has something of that name, for a model to call or inside."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard import _fsdp_common

    return hasattr(FSDPModule, name) or hasattr(_fsdp_common, name)


def train(model: nn.Module, steps: range, body: Callable[[nn.Module, int], None] | None = None) -> list[Tensor]:
    """Steps of SGD with momentum; what this rank has of each parameter after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in steps:
        optimizer.zero_grad()
        if body is None:
            loss(model, step).backward()
        else:
            body(model, step)
        optimizer.step()
    return parts(model)


def parts(model: nn.Module) -> list[Tensor]:
    """What this rank has of each parameter."""
    return [each.detach().to_local() if hasattr(each, "to_local") else each.detach() for each in model.parameters()]


def close(first: list[Tensor], second: list[Tensor], rounding: float = 1e-6) -> bool:
    return all(
        torch.allclose(one, other, rtol=rounding, atol=rounding) for one, other in zip(first, second, strict=True)
    )


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(map(torch.equal, first, second))


def same_on_replicas(tensors: list[Tensor], mesh: DeviceMesh | None = None) -> bool:
    flat = torch.cat([each.reshape(-1).float() for each in tensors])
    group = mesh.get_group() if mesh else replicas()
    found = [torch.empty_like(flat) for _ in range(group.size())]
    dist.all_gather(found, flat, group=group)
    return all(torch.equal(flat, other) for other in found)
