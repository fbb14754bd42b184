"""Periodic averaging from start to end: attaching, stopping and going on."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import ConfigurationError
from local_training import nesterov, network, sgd, train
from models import flat, gathered, same_everywhere
from pool import ranks


@ranks(3)
def test_nothing_is_done_between() -> None:
    net = network()
    optimizer = sgd(net)
    handle = gradwire.periodic(optimizer, every=10)
    sent = handle.stats().wire_bytes
    acts: list[int] = []
    act = handle._act
    handle._act = lambda: acts.append(handle.steps_done) or act()  # type: ignore[method-assign,func-returns-value]
    train(net, optimizer, range(25))
    assert acts == [10, 20]
    workers = dist.get_world_size()
    counts = 8 * (workers - 1)  # of local steps, compared over ranks
    assert handle.stats().wire_bytes - sent == 2 * (counts + 2 * (workers - 1) * 4 * flat(net).numel() // workers)
    handle.close()


class Clamped(torch.optim.SGD):
    """Steps as its parent does, of whose steps torch tells, too, once there is one, and then goes on."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for each in group["params"]:
                each.data.clamp_(-0.1 - 0.01 * dist.get_rank(), 0.1)
        return loss


@ranks(2)
def test_a_step_that_calls_its_parents_is_one() -> None:
    """And is over when the whole of it is, also after one that failed half way."""

    def fails() -> float:
        raise ValueError("half way")

    net = network()
    optimizer = Clamped(net.parameters(), lr=0.01)
    handle = gradwire.periodic(optimizer, every=4, outer=nesterov)
    with pytest.raises(ValueError, match="half way"):
        optimizer.step(fails)
    for step in range(1, 9):
        train(net, optimizer, range(step, step + 1))
        assert handle.steps_done == step
        assert same_everywhere(flat(net)) == (step % 4 == 0)
    handle.close()


@ranks(2)
def test_periods_grow_after_a_warmup() -> None:
    net = network()
    optimizer = sgd(net)
    handle = gradwire.periodic(optimizer, every=lambda period: 1 + period, warmup_steps=3, outer=nesterov)
    averaged = []
    for step in range(1, 14):
        train(net, optimizer, range(step, step + 1))
        if same_everywhere(flat(net)):
            averaged.append(step)
    assert averaged == [1, 2, 3, 4, 6, 9, 13]
    handle.close()

    net = network()
    uneven = gradwire.periodic(
        sgd(net), every=lambda period: (9, 4)[period % 2], fragments=3, cut="strided", delay=3, method="topk", ratio=0.1
    )
    train(net, uneven._optimizer, range(45))
    uneven.synchronize()
    assert same_everywhere(flat(net))
    uneven.close()

    net = network()
    short = gradwire.periodic(sgd(net), every=lambda period: 2 - period)
    optimizer = short._optimizer
    train(net, optimizer, range(2))
    with pytest.raises(ConfigurationError, match=r"every\(2\)=0 is out of range"):
        train(net, optimizer, range(1))
    short.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@ranks(2)
def test_half_precision(dtype: torch.dtype) -> None:
    """What an average moves by less than half precision tells is kept in the float32 anchor."""
    net = nn.Linear(40, 40, bias=False).to(dtype)
    with torch.no_grad():
        net.weight.fill_(1.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    handle = gradwire.periodic(optimizer, every=1, outer=lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    for step in range(1, 21):
        net.weight.grad = torch.full_like(net.weight, 0.0625)
        optimizer.step()
        expected = torch.full((40, 40), 1 - step * 0.000625)
        torch.testing.assert_close(handle._fragments[0].anchor.view(40, 40), expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(net.weight, expected.to(dtype)) or (net.weight.float() - expected).abs().max() < 0.004
    handle.close()


@pytest.mark.parametrize(
    ("kind", "fragments", "cut"),
    [
        ("keep", 1, "layers"),
        ("reset", 1, "layers"),
        ("reset", 2, "layers"),
        ("average", 1, "layers"),
        ("average", 2, "strided"),
    ],
)
@ranks(2)
def test_moments(kind: str, fragments: int, cut: str) -> None:
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    handle = gradwire.periodic(optimizer, every=2, moments=kind, fragments=fragments, cut=cut)  # type: ignore[arg-type]
    train(net, optimizer, range(3))
    due = [fragment for fragment in handle._fragments if handle._schedule.due(fragment.number, 2) == 2]
    alone = copy.deepcopy(net), copy.deepcopy(optimizer.state_dict())
    other = torch.optim.Adam(alone[0].parameters(), lr=1e-3)
    other.load_state_dict(alone[1])
    train(alone[0], other, range(3, 4))
    train(net, optimizer, range(3, 4))
    twins = dict(zip(net.parameters(), alone[0].parameters(), strict=True))
    for piece in due[0].pieces:
        state = optimizer.state.get(piece.parameter, {})
        if kind == "reset":
            assert not state
            continue
        for key in ("exp_avg", "exp_avg_sq"):
            mine = piece.read(other.state[twins[piece.parameter]][key]).contiguous()
            kept = piece.read(state[key])
            if kind == "keep":
                assert torch.equal(kept, mine)
            else:
                torch.testing.assert_close(kept, torch.stack(gathered(mine)).mean(0), rtol=1e-5, atol=1e-9)
    train(net, optimizer, range(4, 6))
    handle.close()


@ranks(3)
def test_steps_are_counted_and_not_averaged() -> None:
    """A third of 7 is no float, and a count of steps has the shape of a scalar."""
    scale = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.Adam([scale], lr=1e-3)
    handle = gradwire.periodic(optimizer, every=7, moments="average")
    for step in range(1, 15):
        scale.grad = torch.tensor(1.0 + dist.get_rank())
        optimizer.step()
        assert optimizer.state[scale]["step"] == step
    handle.close()


@ranks(3)
def test_buffers_are_averaged() -> None:
    net = nn.Sequential(nn.Linear(20, 16), nn.BatchNorm1d(16), nn.Linear(16, 5))
    torch.manual_seed(1)
    for layer in net:
        layer.reset_parameters()  # type: ignore[operator]
    net.register_buffer("table", torch.linspace(0.1, 0.7, 33))
    net.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
    net.register_buffer("unset", torch.full((3,), torch.nan))
    table, mask = net.table.clone(), net.mask.clone()
    optimizer = sgd(net)
    handle = gradwire.periodic(optimizer, every=3, buffers=net, parameters=net.named_parameters())
    train(net, optimizer, range(2))
    alone = copy.deepcopy(net)
    train(alone, sgd(alone), range(2, 3))
    train(net, optimizer, range(2, 3))
    for name in ("running_mean", "running_var"):
        mean = torch.stack(gathered(getattr(alone[1], name))).mean(0)
        torch.testing.assert_close(getattr(net[1], name), mean, rtol=1e-5, atol=1e-6)
        assert same_everywhere(getattr(net[1], name))
    assert handle.dropped == 0
    assert torch.equal(net.table, table)
    assert torch.equal(net.mask, mask)
    assert net.unset.isnan().all()
    assert int(net[1].num_batches_tracked) == 3
    net.register_buffer("late", torch.zeros(2))
    with pytest.raises(ConfigurationError, match=r"buffer 'late' of shape \(2,\) is new since averaging began"):
        train(net, optimizer, range(3, 6))
    handle.close()


@ranks(2)
def test_buffers_are_not_averaged_a_period_late() -> None:
    """Eager updates leave them to local steps, none of which is lost, until training waits for an average."""
    net = nn.Sequential(nn.Linear(20, 5))
    net.register_buffer("count", torch.zeros(1))
    optimizer = sgd(net)
    handle = gradwire.periodic(optimizer, every=2, buffers=net, eager=True, verify_every=1, warmup_steps=1)
    for step in range(7):
        net.count += 1 + 2 * dist.get_rank()
        train(net, optimizer, range(step, step + 1))
    assert net.count == 2 + 6 * (1 + 2 * dist.get_rank())
    handle.synchronize()
    assert net.count == 14
    handle.close()


@pytest.mark.parametrize(
    ("arguments", "stop"),
    [
        ({"every": 4, "method": "qsgd", "memory": "residual"}, 8),
        ({"every": 4, "method": "topk", "ratio": 0.1, "outer": nesterov}, 6),
        (
            {"every": 6, "fragments": 3, "delay": 3, "mix": 0.5, "method": "qsgd", "moments": "average"}
            | {"outer": nesterov, "verify_every": 1},
            11,
        ),
        ({"every": 4, "fragments": 2, "cut": "layers", "delay": 3, "method": "acpsgd", "rank": 2}, 9),
        ({"every": 3, "eager": True, "fragments": 2, "method": "topk", "ratio": 0.1, "outer": nesterov}, 7),
        ({"every": 5, "fragments": 5, "cut": "strided", "warmup_steps": 3, "method": "dense"}, 7),
    ],
)
@ranks(2)
def test_a_stopped_run_goes_on(arguments: dict[str, Any], stop: int) -> None:
    """Bit for bit what an uninterrupted run does, wherever in a period it stops."""

    def attach() -> tuple[nn.Module, torch.optim.Optimizer, gradwire.Periodic]:
        net = network()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        handle = gradwire.periodic(optimizer, parameters=net.named_parameters(), buffers=net, **arguments)
        return net, optimizer, handle

    net, optimizer, handle = attach()
    train(net, optimizer, range(stop))
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict(), handle.state_dict()))
    train(net, optimizer, range(stop, 17))
    handle.synchronize()
    given = copy.deepcopy(saved[2]["periodic"]["outer"])
    again, other, later = attach()
    train(again, other, range(2))
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    later.load_state_dict(saved[2])
    train(again, other, range(stop, 17))
    later.synchronize()
    assert torch.equal(flat(again), flat(net))
    assert (later.steps_done, later.syncs) == (handle.steps_done, handle.syncs)
    steps, of_all = later.stats(), handle.stats()
    assert steps.steps == 2 + 17 - stop
    assert steps.dense_bytes * of_all.steps == of_all.dense_bytes * steps.steps
    if (outer := saved[2]["periodic"]["outer"]) is not None:
        torch.testing.assert_close(outer["state"], given["state"], rtol=0, atol=0)
    changed = {**saved[2], "periodic": {**saved[2]["periodic"], "schedule": {"mix": "0.125"}}}
    with pytest.raises(ConfigurationError, match=r"saved with mix='0\.125', this handle has mix="):
        later.load_state_dict(changed)
    for other_state in ({"version": 1}, None, [1]):
        with pytest.raises(ConfigurationError, match="not of periodic averaging"):
            later.load_state_dict(other_state)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="state version 1 is not known"):
        later.load_state_dict({**saved[2], "version": 1})
    for key in saved[2]["periodic"]:
        lacking = {name: each for name, each in saved[2]["periodic"].items() if name != key}
        with pytest.raises(ConfigurationError, match=f"the state's 'periodic' has no '{key}'"):
            later.load_state_dict({**saved[2], "periodic": lacking})
    assert later.steps_done == 17
    handle.close()
    later.close()


@ranks(1)
def test_states_of_other_outer_optimizers_are_refused() -> None:
    net = network()
    handle = gradwire.periodic(sgd(net), every=2, outer=nesterov)
    train(net, handle._optimizer, range(2))
    saved = handle.state_dict()
    handle.close()
    others = {
        "has no 'amsgrad', 'betas', .* which Adam has": torch.optim.Adam,
        r"has groups of \[6\] tensors, this one of \[1, 5\]": lambda anchors: nesterov(
            [{"params": anchors[:1]}, {"params": anchors[1:]}]  # type: ignore[list-item]
        ),
    }
    for said, outer in others.items():
        other = gradwire.periodic(sgd(net), every=2, outer=outer)
        with pytest.raises(ConfigurationError, match=said):
            other.load_state_dict(saved)
        assert other.outer is not None
        assert (other.steps_done, other.outer.state) == (0, {})
        other.close()


@ranks(3)
def test_buffers_that_begin_infinite() -> None:
    """As the extremes of an observer, of which some workers have seen some and one has seen none."""
    net, rank = nn.Linear(20, 5), dist.get_rank()
    net.register_buffer("least", torch.full((3,), torch.inf))
    optimizer = sgd(net)
    handle = gradwire.periodic(optimizer, every=2, buffers=net, parameters=net.named_parameters(), verify_every=1)
    met = [[torch.inf] * 3, [1.5, 1.0, torch.inf], [1.5, 2.0, 6.0]]
    for period, seen in enumerate(([], [(0, 0, 1.0), (0, 1, 1.0), (1, 0, 2.0)], [(0, 1, 4.0), (2, 2, 6.0)])):
        for whose, place, value in seen:
            net.least[place] = value if rank == whose else net.least[place]
        train(net, optimizer, range(2 * period, 2 * period + 2))
        assert net.least.tolist() == met[period]
    assert (handle.syncs, handle.dropped) == (3, 0)
    net.least[1] = torch.inf if rank == 1 else 0
    train(net, optimizer, range(6, 8))
    assert (handle.syncs, handle.dropped, net.least.tolist()) == (3, 1, met[2])
    handle.synchronize()
    handle.close()


@ranks(2)
def test_state_is_plain(tmp_path: Path) -> None:
    net = network()
    optimizer = sgd(net)
    handle = gradwire.periodic(optimizer, every=4, delay=2, outer=nesterov, method="topk", ratio=0.1)
    train(net, optimizer, range(5))
    where = tmp_path / str(dist.get_rank())
    torch.save(handle.state_dict(), where)
    handle.load_state_dict(torch.load(where, weights_only=True))
    train(net, optimizer, range(5, 8))
    handle.close()


@ranks(4)
def test_across_nodes_and_within() -> None:
    """Two nodes of two: gradients averaged within a node in every step, parameters across nodes every fourth."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "local"))
    net = network()
    model = DistributedDataParallel(net, process_group=mesh["local"].get_group())
    inner = gradwire.compress(model, "efsignsgd")
    optimizer = sgd(model)
    outer = gradwire.periodic(
        optimizer, every=4, method="qsgd", bits=4, parameters=net.named_parameters(), process_group=mesh["nodes"]
    )
    for step in range(1, 13):
        train(model, optimizer, range(step, step + 1))
        values = gathered(flat(net))
        assert torch.equal(values[0], values[1])
        assert torch.equal(values[2], values[3])
        assert torch.equal(values[0], values[2]) == (step % 4 == 0)
    assert outer.syncs == 3
    assert inner.stats().steps == 12
    inner.close()
    outer.close()


class CountingInGroups(torch.optim.SGD):
    """Takes shorter steps as it goes, and counts them beside its options, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["lr"] = 0.4 / (1 + group.setdefault("taken", 0))
            group["taken"] += 1
        super().step(closure)


@ranks(2)
def test_guesses_are_no_steps_of_an_outer_optimizer() -> None:
    net = network()
    optimizer = sgd(net)
    handle = gradwire.periodic(optimizer, every=2, outer=CountingInGroups, eager=True)
    train(net, optimizer, range(6))
    assert [(group["taken"], group["lr"]) for group in handle.outer.param_groups] == [(2, 0.2)]
    assert handle.syncs == 2
    handle.close()


@ranks(2)
def test_an_optimizer_of_the_same_parameters() -> None:
    """Gives what a function gives, groups and all, also for pieces of parameters."""
    results = []
    for as_instance in (False, True):
        net = network()
        outer: Any = nesterov
        if as_instance:
            first, *others = net.parameters()
            options = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
            outer = torch.optim.SGD([{"params": others}, {"params": [first]}], **options)  # type: ignore[arg-type]
        optimizer = sgd(net)
        handle = gradwire.periodic(optimizer, every=3, fragments=3, outer=outer)
        train(net, optimizer, range(9))
        assert handle.outer is not None
        assert (handle.outer is outer) == as_instance
        results.append(flat(net))
        handle.close()
    assert torch.equal(*results)
