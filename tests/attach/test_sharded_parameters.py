"""DTensors, whoever made them: every rank averages its part, over the ranks that have the same."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire
from gradwire import ConfigurationError
from local_training import nesterov
from pool import ranks
from sharded import Net, close, hsdp, hybrid, inputs, loss, parts, same, same_on_replicas, train

STEPS = range(6)


def by_rows_and_columns() -> nn.Module:
    """A model cut over the second dimension of the mesh, as tensor parallelism does."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 10))
    return parallelize_module(net, hybrid()["shard"], {"0": ColwiseParallel(), "2": RowwiseParallel()})


def whole(model: nn.Module) -> list[Tensor]:
    return [
        each.detach().full_tensor() if hasattr(each, "full_tensor") else each.detach() for each in model.parameters()
    ]


def replica() -> int:
    return hybrid()["replicate"].get_local_rank()


@ranks(4)
def test_a_synchronizer_averages_beside_tensor_parallelism() -> None:
    model = by_rows_and_columns()
    reference = nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 10))
    for each, value in zip(reference.parameters(), whole(model), strict=True):
        each.data.copy_(value)
    with closing(gradwire.Synchronizer(model.named_parameters(), "dense", process_group=hybrid()["replicate"])) as sync:

        def averaged(model: nn.Module, step: int) -> None:
            model(inputs(step, replica())).square().mean().backward()
            sync.synchronize()

        def both(model: nn.Module, step: int) -> None:
            sum(model(inputs(step, each)).square().mean() for each in range(2)).div(2).backward()

        train(model, STEPS, averaged)
        assert close(whole(model), train(reference, STEPS, both), 1e-5)
        state = sync.state_dict()
    assert state["parameters"]["0.weight"]["part"] == f"Shard(dim=0) {dist.get_rank() % 2} of 2 of (64, 48)"


@ranks(4)
def test_ranks_that_hold_different_parts_are_never_averaged() -> None:
    model, mesh = by_rows_and_columns(), hybrid()
    wanted = r"parameter '0\.\w+' is cut over ranks .* hold different parts of it; give the group of its replicas"
    for group in (None, mesh["shard"]):
        with pytest.raises(ConfigurationError, match=wanted):
            gradwire.Synchronizer(model.named_parameters(), "dense", process_group=group)
        with pytest.raises(ConfigurationError, match=wanted):
            gradwire.periodic(torch.optim.SGD(model.parameters()), process_group=group)


@pytest.mark.parametrize(
    "arguments",
    [
        {"method": "dense", "outer": nesterov},
        {"method": "qsgd", "bits": 4, "outer": nesterov},
        {"method": "acpsgd", "rank": 2, "fragments": 2, "cut": "layers", "moments": "average"},
        {"method": "topk", "ratio": 0.1, "fragments": 2, "cut": "strided", "delay": 1},
    ],
)
@ranks(4)
def test_diloco_over_sharded_models(arguments: dict[str, Any]) -> None:
    """Each replica trains by FSDP2 for itself; what comes of it is what plain replicas of whole models come to."""
    mesh = hybrid()
    model = hsdp(mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    handle = gradwire.periodic(
        optimizer, every=2, process_group=mesh["replicate"], parameters=model.named_parameters(), **arguments
    )
    with closing(handle):
        for step in STEPS:
            optimizer.zero_grad()
            loss(model, step).backward()
            optimizer.step()
        handle.synchronize()
        assert same_on_replicas(parts(model))
        assert handle.syncs >= 3
        state = handle.state_dict()
        handle.load_state_dict(state)
    if arguments["method"] != "dense" or arguments.get("fragments", 1) > 1:
        return
    reference = Net()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    with closing(gradwire.periodic(optimizer, every=2, process_group=mesh["replicate"], **arguments)) as handle:
        for step in STEPS:
            optimizer.zero_grad()
            first = 2 * replica()
            losses = [reference(inputs(step, rank)).square().mean() for rank in (first, first + 1)]
            (sum(losses) / 2).backward()
            optimizer.step()
        handle.synchronize()
    assert close(whole(model), parts(reference), 1e-4)


@ranks(4)
def test_a_gradient_in_other_placements() -> None:
    """A gradient in other placements than its parameter is brought into these first."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = hybrid()
    values = torch.arange(24.0).view(6, 4)
    named = [("weight", nn.Parameter(distribute_tensor(values, mesh["shard"], [Shard(0)])))]
    with closing(gradwire.Synchronizer(named, "dense", process_group=mesh["replicate"])) as sync:
        _, weight = named[0]
        weight.grad = distribute_tensor(values * (1 + 2 * replica()), mesh["shard"], [Replicate()])
        sync.synchronize()
        assert weight.grad.placements == weight.placements
        assert same([weight.grad.full_tensor()], [2 * values])
        weight.grad = None
        sync.synchronize()
        assert same([weight.grad.full_tensor()], [0 * values])
