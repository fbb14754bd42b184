"""What compression owes to a parameter that takes no part in a step waits for one that it takes part in."""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.methods import LayerMethod, LayerState
from gradwire.wire import AllReduceMean
from pool import Pool, ranks

ALL = gradwire.DensePolicy(below=0, vectors=False)


@dataclass(frozen=True)
class Half(LayerMethod):
    """Sends half of what there is, and owes the rest itself."""

    def average(self, gradient: torch.Tensor, state: LayerState) -> Generator[Any, torch.Tensor, torch.Tensor]:
        state["residual"] = (gradient + state.get("residual", 0)) / 2
        return (yield AllReduceMean(state["residual"]))


METHODS: list[tuple[str | LayerMethod, dict[str, Any]]] = [
    ("topk", {"ratio": 0.05}),
    ("acpsgd", {"rank": 1}),
    ("efsignsgd", {"route": "sharded"}),
    ("topk", {"ratio": 0.05, "granularity": "model"}),
    ("topk", {"ratio": 0.05, "memory": "lowpass"}),
    (Half(), {}),
]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(24, 20), nn.Linear(24, 20)

    def forward(self, values: torch.Tensor, which: int) -> torch.Tensor:
        return (self.second if which else self.first)(values)  # type: ignore[no-any-return]


class Sums:
    """Of mean gradients, and of averages that came of them."""

    def __init__(self, net: Branches) -> None:
        self.net = net
        self.put_in = {name: torch.zeros(each.shape) for name, each in net.named_parameters()}
        self.came_out = copy.deepcopy(self.put_in)

    def loss(self, module: nn.Module, step: int, which: int) -> torch.Tensor:
        noise = torch.Generator().manual_seed(100 * dist.get_rank() + step)
        return module(torch.randn(8, 24, generator=noise), which).square().sum()  # type: ignore[no-any-return]

    def expect(self, step: int, which: int) -> None:
        parameters = [each for each in self.net.parameters() if each.requires_grad]
        found = torch.autograd.grad(self.loss(self.net, step, which), parameters, allow_unused=True)
        gradients = {id(each): grad for each, grad in zip(parameters, found, strict=True)}
        for name, each in self.net.named_parameters():
            grad = gradients.get(id(each))
            mean = torch.zeros(each.shape) if grad is None else grad.clone()
            dist.all_reduce(mean)
            self.put_in[name] += mean / dist.get_world_size()

    def check(self, owed: dict[str, torch.Tensor]) -> None:
        for name, expected in self.put_in.items():
            torch.testing.assert_close(self.came_out[name] + owed[name], expected, rtol=1e-4, atol=1e-3)


# Who uses which branch in each step: both ranks the same, one each, then only one of them for long.
USES = [(0, 0), (1, 1), (0, 1), (1, 1), (1, 1), (1, 0), (1, 1), (0, 0)]


def by_ddp(method: str | LayerMethod, options: dict[str, Any], view: bool, to_none: bool) -> None:
    net = Branches()
    sums = Sums(net)
    model = DistributedDataParallel(net, find_unused_parameters=True, gradient_as_bucket_view=view, bucket_cap_mb=0.001)
    with closing(gradwire.compress(model, method, dense=ALL, **options)) as handle:
        before = gradwire.Owed(handle, model).state_dict()
        for step, uses in enumerate(USES):
            which = uses[dist.get_rank()]
            sums.expect(step, which)
            model.zero_grad(set_to_none=to_none)
            sums.loss(model, step, which).backward()
            for name, each in net.named_parameters():
                if each.grad is not None:
                    sums.came_out[name] += each.grad
            owed = gradwire.Owed(handle, model).state_dict()
            for name, each in net.named_parameters():
                if len(set(uses)) == 1 and name.startswith("second") != (1 in uses):  # used by nobody
                    assert each.grad is None or not each.grad.any()
                    torch.testing.assert_close(owed[name], before[name], rtol=1e-4, atol=1e-3)
            if options.get("memory") != "lowpass":  # which gives up some of what was not sent
                sums.check(owed)
            before = owed
        copy.deepcopy(model)


@pytest.mark.parametrize(("view", "to_none"), [(False, True), (True, True), (False, False), (True, False)])
def test_ddp_throws_nothing_away(pool: Pool, view: bool, to_none: bool) -> None:
    for method, options in METHODS:
        pool.run(2, by_ddp, method, options, view, to_none)


def clearing_only_what_is_used(method: str | LayerMethod, options: dict[str, Any]) -> None:
    net = Branches()
    sums = Sums(net)
    model = DistributedDataParallel(net, find_unused_parameters=True, bucket_cap_mb=0.001)
    with closing(gradwire.compress(model, method, dense=ALL, **options)) as handle:
        for step in range(8):
            branch = net.second if step % 2 else net.first
            sums.expect(step, step % 2)
            branch.zero_grad()  # as an optimizer of its own does; the other keeps what it took last
            sums.loss(model, step, step % 2).backward()
            for name, each in net.named_parameters():
                if name.startswith("second") == bool(step % 2):
                    assert each.grad is not None
                    sums.came_out[name] += each.grad
            sums.check(gradwire.Owed(handle, model).state_dict())


def test_a_gradient_that_was_not_cleared_counts_once(pool: Pool) -> None:
    for method, options in METHODS:
        if options.get("memory") != "lowpass":
            pool.run(2, clearing_only_what_is_used, method, options)


@ranks(2)
def test_what_a_method_without_memory_takes_over_waits_where_nobody_uses_the_parameter() -> None:
    for method, options in [("dense", {}), ("topk", {"ratio": 1.0, "values": "fp32", "memory": "ef21"})]:
        net = Branches()
        sums = Sums(net)
        model = DistributedDataParallel(net, find_unused_parameters=True)
        with closing(gradwire.compress(model, "topk", ratio=0.05, dense=ALL, rollback=True)) as handle:
            for step, which in enumerate((0, 1, 0, 0, 1, 0)):
                if step == 2:
                    handle.change(method, **options)
                model.zero_grad()
                sums.expect(step, which)
                sums.loss(model, step, which).backward()
                for name, each in net.named_parameters():
                    if each.grad is not None:
                        sums.came_out[name] += each.grad
        sums.check({name: torch.zeros(()) for name in sums.put_in})


@ranks(2)
def test_what_was_used_under_no_sync_alone_is_taken() -> None:
    """DDP takes what accumulated, though the backward pass that it averages does not use the parameter."""
    for method, options in [("dense", {}), *METHODS]:
        net = Branches()
        sums = Sums(net)
        model = DistributedDataParallel(net, find_unused_parameters=True)
        with closing(gradwire.compress(model, method, dense=ALL, **options)) as handle:
            for step in range(4):
                model.zero_grad()
                with model.no_sync():
                    sums.loss(model, step, 1).backward()
                sums.loss(model, step, 0).backward()
                sums.expect(step, 0)
                sums.expect(step, 1)
                for name, each in net.named_parameters():
                    assert each.grad is not None
                    assert each.grad.any() or name.endswith("bias")
                    sums.came_out[name] += each.grad
            if options.get("memory") != "lowpass":
                sums.check(gradwire.Owed(handle, model).state_dict())


def in_a_loop_of_ones_own(method: str | LayerMethod, options: dict[str, Any]) -> None:
    net = Branches()
    sums = Sums(net)
    with closing(gradwire.Synchronizer(net, method, dense=ALL, **options)) as sync:
        for step in range(6):
            net.first.requires_grad_(not 2 <= step < 5)
            which = int(2 <= step < 5)
            sums.expect(step, which)
            net.zero_grad()
            sums.loss(net, step, which).backward()
            sync.synchronize()
            for name, each in net.named_parameters():
                if each.grad is not None:
                    sums.came_out[name] += each.grad
            if options.get("memory") != "lowpass":
                sums.check(gradwire.Owed(sync, net).state_dict())


def test_what_is_frozen_for_some_steps_is_owed_as_much_after_them(pool: Pool) -> None:
    for method, options in METHODS:
        pool.run(2, in_a_loop_of_ones_own, method, options)


@ranks(2)
def test_a_step_that_was_refused_freezes_nothing() -> None:
    net, rates = Branches(), iter([0.1, float("nan"), 0.1])
    with closing(gradwire.Synchronizer(net, "topk", dense=ALL, learning_rate=lambda: next(rates))) as sync:
        net.first.requires_grad_(False)
        with pytest.raises(gradwire.ConfigurationError, match="gave nan"):
            sync.synchronize()
        net.first.requires_grad_(True)
        Sums(net).loss(net, 0, 0).backward()
        sync.synchronize()
        assert net.first.weight.grad is not None
        assert net.first.weight.grad.any()


@ranks(2)
def test_nothing_that_is_not_finite_is_given_back() -> None:
    """A step that is not finite elsewhere leaves nothing in the memory of what took no part."""
    net = Branches()
    model = DistributedDataParallel(net, find_unused_parameters=True)
    with closing(gradwire.compress(model, "topk", ratio=0.05, granularity="model", dense=ALL)) as handle:
        for step in range(3):
            model.zero_grad()
            loss = Sums(net).loss(model, step, int(step > 0))
            (loss * float("inf") if step == 1 else loss).backward()
        owed = gradwire.Owed(handle, model).state_dict()
        assert all(each.isfinite().all() for each in owed.values())
        assert owed["first.weight"].any()
