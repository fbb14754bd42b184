"""The choices that all ways in share: one class, the same signatures; and what a handle says of them."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import prune

import gradwire
from gradwire.attach import handle as handles
from gradwire.engine import Choices
from gradwire.errors import ConfigurationError
from gradwire.methods.registry import CHOICES
from gradwire.optim import CompressedAdam

FIELDS = {each.name: each.default for each in dataclasses.fields(Choices)}
EVERYWHERE = {"granularity", "route", "memory", "owner", "seed"}


@pytest.fixture(autouse=True, scope="module")
def _alone() -> Iterator[None]:
    """A group of one worker."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("way", "lacks"),
    [
        (gradwire.compress, set()),
        (gradwire.Synchronizer.__init__, set()),
        (gradwire.periodic, {"grad_scaler", "rollback", "learning_rate", "clip_spikes", "audit_every", "start"}),
        (
            CompressedAdam.__init__,
            {"grad_scaler", "rollback", "learning_rate", "clip_spikes", "audit_every", "verify_every", "start"},
        ),
        (gradwire.roundtrip, set(FIELDS) - EVERYWHERE),
    ],
)
def test_all_ways_in_have_the_same_choices(way: Callable[..., Any], lacks: set[str]) -> None:
    hints, meant = typing.get_type_hints(way), typing.get_type_hints(Choices)
    found = {name: each.default for name, each in inspect.signature(way).parameters.items() if name in FIELDS}
    assert found == {name: default for name, default in FIELDS.items() if name not in lacks}
    assert {name: hints[name] for name in found} == {name: meant[name] for name in found}


def test_messages_know_all_choices() -> None:
    assert set(CHOICES) == set(FIELDS)


def test_choices_are_handed_on() -> None:
    assert Choices().arguments() == {}
    given = Choices(route="gather", verify_every=5)
    assert given.arguments() == {"route": "gather", "verify_every": 5}
    assert Choices.of({**given.arguments(), "ratio": 3}) == given


def network() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(nn.Linear(40, 40), nn.Tanh()), nn.Linear(40, 30))


def trained(net: nn.Module, sync: gradwire.Synchronizer) -> None:
    net(torch.ones(2, 40)).square().sum().backward()
    sync.synchronize()


def test_a_handle_says_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    sync = gradwire.Synchronizer(network(), "topk", ratio=0.05, granularity="block:64", route="sharded")
    expected = (
        "gradwire.Handle(topk(ratio=0.05, values=fp32, indices=elias-fano, granularity=block:64, route=sharded, "
        "memory=residual, dense: 1-D tensors and tensors below 1,024 elements); 1 worker; compressed: 2 tensors, "
        "2,800 elements; averaged densely: 2 tensors, 70 elements)"
    )
    assert repr(sync) == expected
    monkeypatch.setattr(handles, "by_reference", lambda device: ("encode", "QSGD"))
    assert repr(sync) == f"{expected[:-1]}; by the reference on cpu, slowly: encode, QSGD)"
    sync.close()


def test_a_module_is_taken_for_its_parameters() -> None:
    first, second = network(), network()
    second.load_state_dict(first.state_dict())
    for net, given in ((first, first), (second, second.named_parameters())):
        sync = gradwire.Synchronizer(given, "topk", ratio=0.1)
        trained(net, sync)
        sync.close()
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
    sync = gradwire.Synchronizer(torch.compile(first, backend="eager"), "topk")
    assert "0.0.weight" in sync.state_dict()["parameters"]
    sync.close()


def another_parameter(net: nn.Sequential) -> None:
    net[1].weight = nn.Parameter(torch.zeros(30, 40))


def another_module(net: nn.Sequential) -> None:
    net[0] = nn.Sequential(nn.Linear(40, 40), nn.Tanh())


def another_layer(net: nn.Sequential) -> None:
    net.append(nn.Linear(30, 30))


def less(net: nn.Sequential) -> None:
    net[1].bias = None


def more(net: nn.Sequential) -> None:
    net[0][1].scale = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (another_parameter, r"'1\.weight' is another one"),
        (another_module, r"'0\.0\.weight' is another one"),
        (another_layer, r"'2\.weight' is new"),
        (less, r"'1\.bias' is gone"),
        (more, r"'0\.1\.scale' is new"),
    ],
)
def test_another_parameter_in_a_module_is_noticed(change: Callable[[nn.Sequential], None], message: str) -> None:
    net = network()
    sync = gradwire.Synchronizer(net, "topk", ratio=0.1)
    trained(net, sync)
    change(net)
    sent, gradients = sync.stats(), [each.grad.clone() for each in net.parameters() if each.grad is not None]
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=f"parameter {message} since the method was attached"):
            sync.synchronize()
    assert sync.stats() == sent
    left = [each.grad for each in net.parameters() if each.grad is not None]
    assert all(torch.equal(one, other) for one, other in zip(gradients, left, strict=True))
    sync.close()


def test_the_same_parameter_by_another_name_goes_on() -> None:
    net = network()
    sync = gradwire.Synchronizer(net, "topk", ratio=0.1)
    prune.l1_unstructured(net[1], "weight", amount=0.5)
    for _ in range(2):
        net.zero_grad()
        trained(net, sync)
        assert net[1].weight_orig.grad.count_nonzero() == round(0.1 * net[1].weight.numel())
    sync.close()


def test_what_changes_no_parameter_is_no_matter() -> None:
    net = network()
    sync = gradwire.Synchronizer(net, "topk", ratio=0.1)
    net[0][1] = nn.ReLU()
    for _ in range(2):
        trained(net, sync)
    another_parameter(net)
    with pytest.raises(ConfigurationError, match="another one"):
        sync.synchronize()
    sync.close()
