"""A run with periodic averages that goes on with another number of workers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire
from gradwire import ConfigurationError
from gradwire.layout import Block, Granularity, flat_slots
from local_training import nesterov, train
from models import flat, same_everywhere
from pool import Pool

STOP, END = 11, 20

RUNS: dict[str, dict[str, Any]] = {
    "outer optimizer": {"every": 4, "method": "dense", "outer": nesterov},
    "averages on their way": {"every": 6, "method": "dense", "outer": nesterov, "fragments": 3, "delay": 4, "mix": 0.5},
    "memory of workers": {"every": 4, "method": "topk", "ratio": 0.1, "fragments": 2, "cut": "strided"},
    "memory of owners": {"every": 4, "method": "efsignsgd", "fragments": 2, "delay": 1, "outer": nesterov},
    "guesses": {"every": 4, "method": "dense", "eager": True},
    "factors": {"every": 3, "method": "powersgd", "rank": 2, "fragments": 3, "cut": "layers", "moments": "average"},
}


def attached(run: str) -> tuple[nn.Module, torch.optim.Optimizer, gradwire.Periodic]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 64, bias=False), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 30))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    handle = gradwire.periodic(optimizer, parameters=net.named_parameters(), buffers=net, **RUNS[run])
    return net, optimizer, handle


def begun(run: str, folder: str, data: int | None) -> torch.Tensor:
    """Trains on and on, and leaves a checkpoint on the way; returns the parameters at the end."""
    net, optimizer, handle = attached(run)
    train(net, optimizer, range(STOP), data)
    saved = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "handle": handle.state_dict()}
    torch.save(saved, Path(folder, f"{run} {dist.get_rank()}"))
    train(net, optimizer, range(STOP, END), data)
    handle.synchronize()
    handle.close()
    return flat(net)


def gone_on(run: str, folder: str, before: int, data: int | None) -> torch.Tensor:
    """Goes on from the checkpoint of another number of workers."""
    rank, workers = dist.get_rank(), dist.get_world_size()
    saved = [torch.load(Path(folder, f"{run} {each}"), weights_only=True) for each in range(before)]
    states = [each["handle"] for each in saved]
    net, optimizer, handle = attached(run)
    with pytest.raises(ConfigurationError, match=f"of {before} workers.*gradwire.redistribute makes states"):
        handle.load_state_dict(states[0])
    net.load_state_dict(saved[rank % before]["net"])
    optimizer.load_state_dict(saved[rank % before]["optimizer"])
    made = gradwire.redistribute(states, workers)
    handle.load_state_dict(made[rank])
    assert (handle.steps_done, handle.syncs) == (STOP, states[0]["periodic"]["syncs"])
    kept = handle.state_dict()
    for field, tensors in made[rank]["tensors"].items():
        assert all(torch.equal(value, kept["tensors"][field][name]) for name, value in tensors.items())
    torch.testing.assert_close(owed(made), owed(states), rtol=1e-5, atol=1e-8)
    train(net, optimizer, range(STOP, END), data)
    handle.synchronize()
    assert same_everywhere(flat(net))
    assert flat(net).isfinite().all()
    handle.close()
    return flat(net)


def owed(states: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """What compression still owes each piece of the model: the workers' mean, and what owners have of it."""
    total = {}
    for name, described in states[0]["parameters"].items():
        slots = flat_slots([(name, tuple(described["shape"]))])
        total[name] = whole = torch.zeros(slots[0].stop)
        shards = Block.cut(slots, Granularity("layer")).shards(len(states))
        for state, shard in zip(states, shards, strict=True):
            for field, kind in state["kinds"].items():
                value = state["tensors"][field].get(name)
                if kind == "mean" and value is not None:
                    whole += value.reshape(-1) / len(states)
                if kind == "owned" and value is not None:
                    for start, length, position in shard.runs.tolist():
                        whole[start : start + length] += value[position : position + length]
    return total


def several(work: Any, runs: list[str], *arguments: Any) -> list[torch.Tensor]:
    return [work(run, *arguments) for run in runs]


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_other_workers_go_on_where_a_run_stopped(pool: Pool, tmp_path: Path, before: int, after: int) -> None:
    pool.run(before, several, begun, list(RUNS), str(tmp_path), None)
    pool.run(after, several, gone_on, list(RUNS), str(tmp_path), before, None)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_how_many_work_changes_nothing_where_all_do_the_same(
    pool: Pool, tmp_path: Path, before: int, after: int
) -> None:
    """Up to the rounding of sums: anchors, outer momenta, averages on their way and memories are all gone on with."""
    runs = ["outer optimizer", "averages on their way", "memory of workers"]
    alone = pool.run(before, several, begun, runs, str(tmp_path), 0)[0]
    others = pool.run(after, several, gone_on, runs, str(tmp_path), before, 0)[0]
    for run, expected, found in zip(runs, alone, others, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=partial("{}: {}".format, run))


def met(folder: str) -> dict[str, torch.Tensor]:
    """The parameters once all have been averaged, before any further step."""
    rank = dist.get_rank()
    saved = [torch.load(Path(folder, f"guesses {each}"), weights_only=True) for each in range(3)]
    net, _, handle = attached("guesses")
    net.load_state_dict(saved[rank]["net"])
    handle.load_state_dict(gradwire.redistribute([each["handle"] for each in saved], dist.get_world_size())[rank])
    handle.synchronize()
    handle.close()
    return {name: each.detach() for name, each in net.named_parameters()}


def test_eager_workers_go_on_from_their_own_guesses(pool: Pool, tmp_path: Path) -> None:
    """What a worker changed since the last average was sent counts from where it then went, which differs."""
    pool.run(3, several, begun, ["guesses"], str(tmp_path), None)
    saved = [torch.load(tmp_path / f"guesses {each}", weights_only=True) for each in range(2)]
    periodic = [each["handle"]["periodic"] for each in saved]
    for name, found in pool.run(2, met, str(tmp_path))[0].items():
        changes = [own["origins"][name] - each["net"][name] for own, each in zip(periodic, saved, strict=True)]
        torch.testing.assert_close(found, periodic[0]["changes"][name] - torch.stack(changes).mean(0))


def test_states_of_different_local_steps_are_refused(pool: Pool) -> None:
    states = pool.run(1, saved_after, [3, 4])[0]
    states[1]["rank"] = 1
    for state in states:
        state["world_size"] = 2
    with pytest.raises(ConfigurationError, match="rank 1 has 4 local steps, that of rank 0 has 3"):
        gradwire.redistribute(states, 3)
    del states[1]["periodic"]
    with pytest.raises(ConfigurationError, match="rank 1 has no local steps, that of rank 0 has 3"):
        gradwire.redistribute(states, 3)


def saved_after(steps: list[int]) -> list[dict[str, Any]]:
    net, optimizer, handle = attached("outer optimizer")
    states, done = [], 0
    for step in steps:
        train(net, optimizer, range(done, step))
        states.append(handle.state_dict())
        done = step
    handle.close()
    return states
