"""With the learning rate known, memories are in units of the update."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire import ConfigurationError
from gradwire.methods import LayerMethod, LayerState
from gradwire.wire import AllReduceMean
from pool import ranks

RATES = [0.0, 0.5, 0.3, 0.0, 0.0, 0.07, 0.01, 0.0]
WEIGHED: list[tuple[str, dict[str, Any]]] = [
    ("efsignsgd", {"route": "sharded"}),
    ("topk", {"ratio": 0.05}),
    ("powersgd", {"rank": 2}),
    ("acpsgd", {"rank": 2}),
    ("threshold", {"threshold": 2.0}),
    ("globalqsgd", {"memory": "residual"}),
]

SHAPE = (40, 50)


def gradient(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(100 * rank + step))


@ranks(2)
def test_updates_and_memories_add_up_to_what_was_due() -> None:
    """Updates applied plus rate times memories are the updates due, with a bad step and a resumed run in between."""
    for method, options in WEIGHED:
        current = [RATES[0]]
        choices = {
            "memory": "residual",
            "rollback": True,
            "learning_rate": lambda current=current: current[0],
            **options,
        }
        parameter = torch.nn.Parameter(torch.zeros(SHAPE))
        sync = gradwire.Synchronizer([("weight", parameter)], method, **choices)
        due, applied = torch.zeros(SHAPE), torch.zeros(SHAPE)
        for step, rate in enumerate(RATES):
            current[0] = rate
            if step == 2:
                parameter.grad = gradient(dist.get_rank(), step) * torch.inf
                sync.synchronize()
            if step == 3:
                state = sync.state_dict()
                sync.close()
                sync = gradwire.Synchronizer([("weight", parameter)], method, **choices)
                sync.load_state_dict(state)
            parameter.grad = gradient(dist.get_rank(), step)
            sync.synchronize()
            due += rate * (gradient(0, step) + gradient(1, step)) / 2
            applied += rate * parameter.grad
        tensors = sync.state_dict()["tensors"]
        owed = tensors["residual"]["weight"].flatten() / 2
        if "owner_residual" in tensors:
            owed[1000 * dist.get_rank() :][:1000] += tensors["owner_residual"]["weight"]
        dist.all_reduce(owed)
        torch.testing.assert_close(applied + RATES[-2] * owed.view(SHAPE), due, rtol=0, atol=1e-5, msg=method)
        sync.close()


@dataclass(frozen=True)
class Half(LayerMethod):
    """Sends half of what there is, and owes the rest itself."""

    def average(self, gradient: torch.Tensor, state: LayerState) -> Generator[Any, torch.Tensor, torch.Tensor]:
        state["residual"] = (gradient + state.get("residual", 0)) / 2
        return (yield AllReduceMean(state["residual"]))


@ranks(1)
def test_what_a_layer_method_owes_is_weighed_beside_other_methods() -> None:
    current = [0.0]
    named = [(name, torch.nn.Parameter(torch.zeros(SHAPE))) for name in ("own", "other")]
    methods: dict[str, Any] = {"own": Half(), "*": "topk"}
    sync = gradwire.Synchronizer(named, methods, learning_rate=lambda: current[0])
    due, applied = torch.zeros(SHAPE), torch.zeros(SHAPE)
    for step, rate in enumerate(RATES):
        current[0] = rate
        for _, each in named:
            each.grad = gradient(0, step)
        sync.synchronize()
        due += rate * gradient(0, step)
        applied += rate * named[0][1].grad  # type: ignore[operator]
    owed = sync.state_dict()["tensors"]["residual"]["own"]
    torch.testing.assert_close(applied + RATES[-2] * owed, due, rtol=0, atol=1e-5)
    sync.close()


@ranks(1)
def test_rates_are_checked() -> None:
    named = [("weight", torch.nn.Parameter(torch.zeros(SHAPE)))]
    with pytest.raises(ConfigurationError, match=r"learning_rate=0\.1 cannot be called; give a function"):
        gradwire.Synchronizer(named, "topk", learning_rate=0.1)
    for rate in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigurationError, match="by which no memory can be weighed; give a finite rate"):
            gradwire.Synchronizer(named, "topk", learning_rate=lambda rate=rate: rate)
    for carried in ("none", "ef21", gradwire.memory.Residual(dtype="bfloat16")):
        with pytest.raises(ConfigurationError, match=r"nothing to weigh in memory=.*; choose memory='residual'"):
            gradwire.Synchronizer(named, "topk", memory=carried, learning_rate=lambda: 0.1)


@ranks(1)
def test_a_bad_rate_on_the_way_ends_nothing() -> None:
    """Is refused before the step begins; the run goes on as if it had not been given."""
    found = []
    for rates in ([0.5, 0.1], [0.5, -1.0, float("nan"), 0.1]):
        current = [0.5]
        parameter = torch.nn.Parameter(torch.zeros(SHAPE))
        sync = gradwire.Synchronizer([("weight", parameter)], "topk", learning_rate=lambda current=current: current[0])
        for rate in rates:
            current[0] = rate
            parameter.grad = given = gradient(0, sync.engine.step)
            if rate > 0:
                sync.synchronize()
            else:
                with pytest.raises(ConfigurationError, match="by which no memory can be weighed"):
                    sync.synchronize()
                assert torch.equal(parameter.grad, given)
        found.append((parameter.grad, sync.state_dict()["tensors"]["residual"]["weight"]))
        sync.close()
    assert all(map(torch.equal, *found))
