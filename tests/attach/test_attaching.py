"""Attaching is done by all ranks or by none, and whoever does not says why to all."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.attach import handle as handles
from gradwire.attach import roll_call
from gradwire.errors import ConfigurationError
from launched import warnings_of_gradwire
from pool import ranks

Attach = Callable[..., Any]


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(30, 30)


def synchronizer(**options: Any) -> gradwire.Synchronizer:
    return gradwire.Synchronizer(network().named_parameters(), "topk", **options)


def ddp(**options: Any) -> gradwire.Handle:
    return gradwire.compress(DistributedDataParallel(network()), "topk", **options)


def periodic(**options: Any) -> gradwire.Handle:
    return gradwire.periodic(torch.optim.SGD(network().parameters(), lr=0.1), method="topk", **options)


def adam(**options: Any) -> gradwire.optim.OneBitAdam:
    return gradwire.optim.OneBitAdam(network().named_parameters(), **{"freeze_step": 3, "method": "topk", **options})


WRONG: list[tuple[Attach, dict[str, Any], str]] = [
    (synchronizer, {"ratio": 2}, "ratio=2 is out of range"),
    (ddp, {"ratio": 2}, "ratio=2 is out of range"),
    (periodic, {"every": 0}, "every=0 is out of range"),
    (periodic, {"fragments": 10**6, "every": 10**7}, "fragments=1000000 is out of range"),
    (adam, {"freeze_step": 0}, "freeze_step=0 is out of range"),
    (adam, {"ratio": 2}, "ratio=2 is out of range"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
@ranks(3)
def test_what_is_wrong_on_one_rank_is_told_to_all(number: int) -> None:
    """Then all of them are; where all ranks are wrong each of them says so; and all can try again."""
    attach, options, message = WRONG[number]
    if dist.get_rank() == 1:
        with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}"):
            attach(**options)
    else:
        with pytest.raises(ConfigurationError, match=rf"^rank 1 could not attach: ConfigurationError: {message}"):
            attach()
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}"):
        attach(**options)
    attach().close()


@ranks(2)
def test_a_rank_that_does_not_come_is_named() -> None:
    group, others = dist.new_group(timeout=timedelta(seconds=1)), dist.new_group()
    if dist.get_rank() == 1:
        dist.barrier(others)
    with pytest.raises(ConfigurationError, match=r"rank 1 of 2 did not come to attach within .* timeout of 1 s"):
        synchronizer(process_group=group)
    if dist.get_rank() == 0:
        dist.barrier(others)
    synchronizer(process_group=group).close()


@ranks(2)
def test_a_rank_that_prepares_for_long_is_waited_for() -> None:
    """Longer than the group's timeout."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    usual = handles.rehearse_all

    def rehearse_all(*arguments: Any, **options: Any) -> None:
        time.sleep(2 * dist.get_rank())
        usual(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handles, "rehearse_all", rehearse_all)
        sync = synchronizer(process_group=group)
    sync.synchronize()
    sync.close()


@ranks(2)
def test_models_in_another_order_are_told_apart() -> None:
    models = [network(seed=1), network(seed=2)]
    order = models if dist.get_rank() == 0 else models[::-1]
    with pytest.raises(ConfigurationError, match=r"'weight' has other values on rank 1 than on rank 0; .* same order"):
        gradwire.Synchronizer(order[0].named_parameters(), "topk")
    wrapped = [DistributedDataParallel(model) for model in models]
    with pytest.raises(ConfigurationError, match=r"'weight' has other values on rank 1 than on rank 0; .* same order"):
        gradwire.compress(wrapped[dist.get_rank()], "topk")
    for model in models:
        gradwire.Synchronizer(model.named_parameters(), "topk").close()


Way = Callable[[nn.Module, str], gradwire.Handle]

WAYS: list[Way] = [
    lambda net, name: gradwire.Synchronizer(net, "topk", name=name),
    lambda net, name: gradwire.compress(DistributedDataParallel(net), "topk", name=name),
    lambda net, name: gradwire.periodic(torch.optim.SGD(net.parameters(), lr=0.1), method="topk", name=name),
]


@pytest.mark.parametrize("number", range(len(WAYS)))
@ranks(2)
def test_equal_models_in_another_order_are_told_apart_by_their_names(number: int) -> None:
    """Of the same shapes and values: on all ranks; and in the same order both are averaged."""
    attach, rank = WAYS[number], dist.get_rank()
    models = {"actor": network(), "critic": network()}
    for names in (("actor", "critic"), ("critic", "actor")):
        message = "ranks differ: rank 0 has 'name={}', rank 1 has 'name={}'; attach with the same model".format(*names)
        with pytest.raises(ConfigurationError, match=message):
            attach(models[names[rank]], names[rank])
    handles_of = {name: attach(net, name) for name, net in models.items()}
    assert repr(handles_of["critic"]).count("gradwire.Handle(critic: topk(") == 1
    for each in handles_of.values():
        each.close()
    with pytest.raises(ConfigurationError, match="name='' is no name; give a text such as 'critic'"):
        attach(models["actor"], "")


@ranks(2)
def test_equal_models_without_names_are_warned_of() -> None:
    """While both are attached; a model attached anew, or twice, is no other one."""
    with warnings_of_gradwire() as lines:
        first, second = network(), network()
        gradwire.Synchronizer(first, "topk").close()
        handles_of = [gradwire.Synchronizer(net, "topk", name=name) for net, name in ((first, None), (second, "b"))]
        handles_of += [gradwire.Synchronizer(net, "topk") for net in (first, network(seed=1))]
        assert lines == []
        handles_of.append(gradwire.Synchronizer(second, "topk"))
        assert len(lines) == (dist.get_rank() == 0)
        assert not lines or "two models of the same shapes and values are attached" in lines[0]
        for each in handles_of:
            each.close()


@ranks(2)
def test_a_rank_that_goes_on_with_plain_ddp_is_named() -> None:
    """Where the other attaches and this one trains: an error on each when the group's timeout is over, and no hang."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    model = DistributedDataParallel(network(), process_group=group)
    if dist.get_rank() == 0:
        with pytest.MonkeyPatch.context() as patch, warnings_of_gradwire() as lines:
            patch.setattr(roll_call, "PATIENCE", 0.5)
            with pytest.raises(ConfigurationError, match=r"rank 1 of 2 did not come to attach .* timeout of 3 s"):
                gradwire.compress(model, "topk")
        told = "rank 1 of 2 has not come to attach yet; rank 0 waits, until the process group's timeout is over"
        assert lines == [told]
    else:
        with pytest.raises(RuntimeError, match=r"(?i)timed out"):
            model(torch.ones(2, 30)).sum().backward()
    dist.barrier()
    synchronizer().close()
