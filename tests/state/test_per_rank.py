"""Whose a saved state is, where some ranks average with some others: it comes back to whom it was of, or not at all."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import gradwire
from gradwire import ConfigurationError
from pool import Pool, ranks

PAIRS = [(0, 2), (1, 3)]


def own_group(pairs: list[tuple[int, ...]]) -> dist.ProcessGroup:
    """Every rank makes all groups, as docs/periodic.md has it; each is in one of them."""
    groups = [dist.new_group(list(ranks)) for ranks in pairs]
    return next(group for group, ranks in zip(groups, pairs, strict=True) if dist.get_rank() in ranks)


def synchronizer(group: dist.ProcessGroup | None = None) -> gradwire.Synchronizer:
    torch.manual_seed(0)
    net = nn.Linear(40, 40)
    return gradwire.Synchronizer(net.named_parameters(), "efsignsgd", route="gather", process_group=group)


def step(sync: gradwire.Synchronizer) -> None:
    noise = torch.Generator().manual_seed(dist.get_rank())
    for _, parameter in sync._named:
        parameter.grad = torch.randn(parameter.shape, generator=noise)
    sync.synchronize()


def residual(state: dict[str, Any]) -> torch.Tensor:
    kept: torch.Tensor = state["tensors"]["residual"]["weight"]
    return kept


def each_rank_gets_its_own(folder: str) -> None:
    group = own_group(PAIRS)
    sync, again = synchronizer(group), synchronizer(group)
    step(sync)
    dcp.save({"gradwire": gradwire.PerRank(sync)}, checkpoint_id=folder)
    dcp.load({"gradwire": gradwire.PerRank(again)}, checkpoint_id=folder)
    assert torch.equal(residual(again.state_dict()), residual(sync.state_dict()))
    sync.close()
    again.close()


def test_two_groups_in_one_checkpoint(pool: Pool, tmp_path: Path) -> None:
    pool.run(4, each_rank_gets_its_own, str(tmp_path))


@ranks(4)
def test_states_of_another_group() -> None:
    """A rank of another group may have the same number there; and a saved state says whose it is."""
    sync = synchronizer(own_group(PAIRS))
    step(sync)
    buffer = io.BytesIO()
    torch.save(sync.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    sync.load_state_dict(state)
    rank = dist.get_rank()
    received: list[Any] = [None] * 4
    dist.all_gather_object(received, state)
    with pytest.raises(ConfigurationError, match=r"saved by a worker of ranks .*, this one's are .*redistribute"):
        sync.load_state_dict(received[rank ^ 1])
    with pytest.raises(ConfigurationError, match="has ranks="):
        gradwire.redistribute([received[0], received[3]], 2)
    for workers in (1, 2):
        made = gradwire.redistribute([received[1], received[3]], workers)
        other = synchronizer(own_group([(0, 1), (2, 3)] if workers == 2 else [(0,), (1,), (2,), (3,)]))
        other.load_state_dict(made[other.engine.rank])
        if workers == 2:
            assert torch.equal(residual(other.state_dict()), residual(received[2 * (rank % 2) + 1]))
        other.close()
    sync.close()


def bare_handle_is_refused(folder: str) -> None:
    sync = synchronizer()
    optimizer = gradwire.optim.OneBitAdam(nn.Linear(40, 40).parameters(), lr=0.1, freeze_step=2)
    for bare in (sync, optimizer):
        with pytest.raises(CheckpointException, match=r"save gradwire\.PerRank\(handle\) in its place"):
            dcp.save({"gradwire": bare}, checkpoint_id=folder)
        with pytest.raises(CheckpointException, match=r"save gradwire\.PerRank\(handle\) in its place"):
            dcp.async_save({"gradwire": bare}, checkpoint_id=folder).result()  # type: ignore[union-attr]
    dcp.save({"gradwire": gradwire.PerRank(sync)}, checkpoint_id=folder)
    dcp.async_save({"gradwire": gradwire.PerRank(sync)}, checkpoint_id=folder).result()  # type: ignore[union-attr]
    sync.close()
    optimizer.close()


def test_a_bare_handle_in_a_distributed_checkpoint(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, bare_handle_is_refused, str(tmp_path))
