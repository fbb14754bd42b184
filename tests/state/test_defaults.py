"""What a recipe takes depends on the number of workers, and a run goes on all the same."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire
from gradwire import ConfigurationError
from pool import Pool

State = dict[str, Any]
Methods = str | dict[str, str]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 64), nn.Linear(64, 24))


def some_steps(states: list[State] | None, method: Methods, route: str | None, scales: list[float]) -> tuple[Any, ...]:
    """Sums of gradients and of averages, the state, and the choices; gradients are noise times a step's scale."""
    net = model()
    torch.set_num_threads(1)
    with closing(gradwire.Synchronizer(net, method, route=route)) as sync:
        rank, workers = torch.distributed.get_rank(), torch.distributed.get_world_size()
        if states is not None:
            sync.load_state_dict(gradwire.redistribute(states, workers)[rank])
        noise, given, averages = torch.Generator().manual_seed(rank), zeros(net), zeros(net)
        for scale in scales:
            for name, each in net.named_parameters():
                each.grad = torch.randn(each.shape, generator=noise) * scale
                given[name] += each.grad
            sync.synchronize()
            for name, each in net.named_parameters():
                averages[name] += each.grad
        return given, averages, sync.state_dict(), sync.configuration.describe()


def zeros(net: nn.Module) -> dict[str, Tensor]:
    return {name: torch.zeros_like(each) for name, each in net.named_parameters()}


def owed(states: list[State], name: str, shape: torch.Size) -> Tensor:
    """To the model: the mean of what workers owe, and what owners do."""
    kept = [state["tensors"] for state in states]
    workers = torch.stack([each["residual"][name].reshape(shape) for each in kept]).mean(0)
    owners = [each["owner_residual"][name] for each in kept if name in each.get("owner_residual", {})]
    return workers + (torch.cat(owners)[: shape.numel()].view(shape) if owners else 0)


@pytest.mark.parametrize(
    "method", ["recipe:sgd", {"0.*": "recipe:sgd", "*": "recipe:adamw"}], ids=["recipe", "patterns"]
)
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3)])
def test_goes_on_by_another_route_and_loses_nothing(pool: Pool, before: int, after: int, method: Methods) -> None:
    first = pool.run(before, some_steps, None, method, None, [1.0, 1.0, 1.0])
    states = [state for _, _, state, _ in first]
    second = pool.run(after, some_steps, states, method, None, [0.0, 0.0])
    assert first[0][3] != second[0][3]
    for name, shape in [(name, each.shape) for name, each in model().named_parameters()]:
        given = torch.stack([each[0][name] for each in first]).mean(0)
        left = owed([state for _, _, state, _ in second], name, shape)
        assert left.any()
        torch.testing.assert_close(first[0][1][name] + second[0][1][name] + left, given, rtol=1e-5, atol=1e-5)
        assert second[0][1][name].norm() > 0.2 * owed(states, name, shape).norm(), "it was sent"


def loaded(states: list[State], method: str) -> str:
    with closing(gradwire.Synchronizer(model(), method)) as sync:
        state = gradwire.redistribute(states, torch.distributed.get_world_size())[torch.distributed.get_rank()]
        with pytest.raises(ConfigurationError) as refused:
            sync.load_state_dict(state)
        return str(refused.value)


def test_what_was_named_stays_what_it_is(pool: Pool) -> None:
    states = [state for _, _, state, _ in pool.run(4, some_steps, None, "recipe", None, [1.0])]
    assert (
        "saved with route='sharded', this handle has route='gather'"
        in pool.run(2, loaded, states, "subspace:bits=1.5")[0]
    )
    assert (
        "saved with method='subspace', this handle has method='deadzone'"
        in pool.run(2, loaded, states, "deadzone:bits=0.1")[0]
    )


@pytest.mark.parametrize("route", ["gather", "sharded"])
def test_a_route_may_be_given_with_any_number_of_workers(pool: Pool, route: str) -> None:
    taken = [pool.run(workers, some_steps, None, "recipe", route, [1.0])[0][3] for workers in (2, 4)]
    assert taken[0] == taken[1]
    assert taken[0]["route"] == route


def test_what_a_recipe_takes_with_others_need_not_suit_what_is_given(pool: Pool) -> None:
    """With many workers it is a line that says its route."""
    assert pool.run(4, chosen, None, None)[0]["route"] == "sharded"
    assert pool.run(4, chosen, "gather", None)[0]["route"] == "gather"
    assert pool.run(4, chosen, None, "model")[0]["granularity"] == "model"


def chosen(route: str | None, granularity: str | None) -> dict[str, str]:
    with closing(gradwire.Synchronizer(model(), "recipe:sgd", route=route, granularity=granularity)) as sync:
        return sync.configuration.describe()
