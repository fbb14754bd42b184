"""Two-level averages among processes: trained, restarted, refused, and in every way in."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from flat_world import FIRSTS, PLACES, averaged, gradients_of, on_a_network, world_of
from gradwire.errors import ConfigurationError
from models import batch, flat, network, parameters
from pool import Pool
from sharded import replicated, train


def torchrun(rank: int, started: int = 2) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank % started), "LOCAL_WORLD_SIZE": str(started)}


def test_a_network_gives_the_bits_of_a_world_in_one_process(pool: Pool) -> None:
    """But for what gloo adds up over all four, whose sums have several orders: that is as close as float32 is."""
    chosen = [case for case in FIRSTS if case.method not in ("dense", "fp16", "bf16")]
    results = pool.run(4, on_a_network, chosen, {"inside": 2})
    for number, case in enumerate(chosen):
        world = world_of(case, 4, inside=2)
        shared = [
            slot.name
            for share in world.engines[0].shares(world._buckets[0][0].unit)
            if share.within
            for slot in share.within.slots
        ]
        for step in range(3):
            ours = averaged(world, gradients_of(4, step))
            for rank in range(4):
                theirs = results[rank][number][step]
                assert torch.equal(theirs, results[0][number][step]), (str(case), rank)
                assert torch.allclose(theirs, ours, rtol=1e-5, atol=1e-6), str(case)
                for name in shared:
                    assert torch.equal(theirs[PLACES[name]], ours[PLACES[name]]), (str(case), name)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    inputs, labels = batch(dist.get_rank(), step)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()


def trained(method: str, steps: int, choices: dict[str, Any]) -> tuple[Tensor, dict[str, Any], str, gradwire.Stats]:
    """A DDP model after some steps, and what its handle says; two processes are a node."""
    os.environ.update(torchrun(dist.get_rank()))
    model = DistributedDataParallel(network())
    handle = gradwire.compress(model, method, inside="node", **choices)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        take_step(model, optimizer, step)
    found = flat(model), handle.state_dict(), repr(handle), handle.stats()
    handle.close()
    return found


@pytest.mark.parametrize(
    ("method", "choices"),
    [
        ("efsignsgd", {"verify_every": 2}),
        ("powersgd", {"start": 2, "rollback": True}),
        ("topk", {"audit_every": 2, "route": "sharded", "ratio": 0.1}),
    ],
)
def test_ddp_trains_in_two_levels(pool: Pool, method: str, choices: dict[str, Any]) -> None:
    results = pool.run(4, trained, method, 6, choices)
    first = results[0]
    assert all(torch.equal(model, first[0]) for model, *_ in results)
    assert "inside=2" in first[2]
    assert "4 workers on 2 nodes of 2, which average in float32 inside" in first[2]
    assert first[3].node_bytes > 0
    assert f"{first[3].as_dict()['node_bytes']:.0f}" == str(first[3].node_bytes)
    residuals = [state["tensors"]["residual"]["0.weight"].shape for _, state, _, _ in results]
    assert residuals == [(48, 48)] * 4
    with pytest.raises(ConfigurationError, match=r"share what they remember inside nodes \(inside=2\), 4 in all"):
        gradwire.redistribute([state for _, state, _, _ in results], workers=2)


HALF = gradwire.memory.Residual(dtype="bfloat16")


def resumed(method: str, choices: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The same steps in one run, and in two of which the second loads what the first saved."""
    ends = []
    for parts in ((6,), (3, 3)):
        states: tuple[Any, Any] | None = None
        done = 0
        for steps in parts:
            model = DistributedDataParallel(network())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            handle = gradwire.compress(model, method, inside=2, **choices)
            if states is not None:
                model.load_state_dict(states[0])
                handle.load_state_dict(states[1])
            for step in range(done, done + steps):
                take_step(model, optimizer, step)
            done += steps
            states = {name: each.clone() for name, each in model.state_dict().items()}, handle.state_dict()
            handle.close()
        ends.append(flat(model))
    return ends[0], ends[1]


@pytest.mark.parametrize(
    ("method", "choices"),
    [
        ("qsgd", {"memory": "diana"}),
        ("acpsgd", {"rank": 2}),
        ("efsignsgd", {"memory": HALF}),
    ],
)
def test_a_restart_gives_the_same_bits(pool: Pool, method: str, choices: dict[str, Any]) -> None:
    for once, twice in pool.run(4, resumed, method, choices):
        assert torch.equal(once, twice)


def refused(inside_of: Callable[[int], Any], model: str = "topk") -> str:
    with pytest.raises(ConfigurationError) as caught:
        gradwire.Synchronizer(parameters(), model, inside=inside_of(dist.get_rank()))
    sync = gradwire.Synchronizer(parameters(), model, inside=2)  # nobody is left waiting
    sync.close()
    return str(caught.value)


def of_three(rank: int) -> int:
    return 3


def two_or_four(rank: int) -> int:
    return 2 if rank < 3 else 4


@pytest.mark.parametrize(
    ("inside_of", "message"),
    [
        (of_three, "4 workers are no nodes of inside=3 each"),
        (two_or_four, "rank 0 has 'inside=2', rank 3 has 'inside=4'"),
    ],
)
def test_ranks_agree_on_their_nodes(pool: Pool, inside_of: Callable[[int], Any], message: str) -> None:
    for said in pool.run(4, refused, inside_of):
        assert message in said


def local_steps() -> tuple[Tensor, int, int]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = gradwire.periodic(optimizer, every=2, method="topk", ratio=0.1, route="sharded", fragments=2, inside=2)
    for step in range(8):
        take_step(model, optimizer, step)
    handle.synchronize()
    stats = handle.stats()
    handle.close()
    return flat(model), stats.wire_bytes, stats.node_bytes


def signs_of_momenta() -> tuple[Tensor, int, int]:
    model = network()
    optimizer = gradwire.optim.OneBitAdam(model.named_parameters(), freeze_step=3, lr=1e-2, inside=2)
    for step in range(8):
        take_step(model, optimizer, step)
    stats = optimizer.stats()
    optimizer.close()
    return flat(model), stats.wire_bytes, stats.node_bytes


def replicas_of_fsdp2() -> tuple[Tensor, int, int]:
    model = replicated()
    handle = gradwire.compress(model, "efsignsgd", inside=2)
    trained = torch.cat([each.flatten() for each in train(model, range(3))])
    stats = handle.stats()
    handle.close()
    return trained, stats.wire_bytes, stats.node_bytes


@pytest.mark.parametrize("training", [local_steps, signs_of_momenta, replicas_of_fsdp2])
def test_other_averages_have_two_levels_too(pool: Pool, training: Callable[[], tuple[Tensor, int, int]]) -> None:
    results = pool.run(4, training)
    assert all(torch.equal(model, results[0][0]) for model, _, _ in results)
    assert all(near > between > 0 for _, between, near in results)
