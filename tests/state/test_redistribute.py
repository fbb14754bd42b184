"""The states of some workers become those of others, and nothing that was owed to the model is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire
from catalogue import OPTIONS, Case, cases, possible_memories
from gradwire import ConfigurationError, memory, methods
from gradwire.engine import Configuration, DensePolicy
from gradwire.engine.choices import Choices
from gradwire.engine.mixture import configure
from gradwire.layout import ALIGNMENT, aligned, flat_slots, shard_bounds
from gradwire.local.world import LocalWorld
from gradwire.memory import Kind, Residual
from gradwire.state.form import VERSION

SHAPES = (("matrix", (72, 48)), ("filter", (8, 4, 3, 3)), ("vector", (70,)), ("crumb", (5,)))
SLOTS = flat_slots(SHAPES)
NUMEL = SLOTS[-1].stop
PARAMETERS = {name: {"shape": list(shape), "dtype": "torch.float32"} for name, shape in SHAPES}
PAIRS = [(4, 2), (2, 4), (3, 2), (1, 3), (4, 1)]


HALF = Residual(dtype="bfloat16")
"""No method's own."""


def chosen() -> list[Case]:
    """Every method, with every memory, on every route; a block size that leaves gaps between runs, too."""
    found = []
    for name in methods.names():
        kind, options = methods.get(name), OPTIONS.get(name, [{}])[0]
        found += [
            Case(name, options, kind.granularities[0], route, carried)
            for route in kind.routes
            for carried in (
                possible_memories(kind, options) if name in ("topk", "qsgd", "scalecom", "gradiveq") else [kind.memory]
            )
        ]
    extra = [
        Case("efsignsgd", {}, "block:100", "sharded", "residual"),
        Case("efsignsgd", {}, "model", "sharded", "residual"),
        Case("deadzone", {"bits": 1.0}, "bucket", "sharded", "residual"),
        Case("efsignsgd", {}, "block:96", "sharded", "lowpass"),
        Case("efsignsgd", {}, "layer", "sharded", HALF),
        Case("topk", {"ratio": 0.1}, "bucket", "sharded", "dgc"),
    ]
    return found + extra


EVERYTHING = DensePolicy(below=0, vectors=False)


def world(case: Case, workers: int, dense: DensePolicy = EVERYTHING) -> LocalWorld:
    options = dict(case.options)
    configuration = Configuration.make(
        case.method, options, case.granularity, case.route, case.memory, owner=None, dense=dense
    )
    return LocalWorld(configuration, SLOTS, workers)


def states_of(together: LocalWorld) -> list[dict[str, Any]]:
    return [
        {
            "version": VERSION,
            "configuration": engine.configuration.describe(),
            "parameters": PARAMETERS,
            "rank": engine.rank,
            "world_size": engine.world_size,
            "ranks": range(engine.world_size),
            "step": engine.step,
            "dense_steps": engine.dense_steps,
            "paused": engine.paused,
            "buckets": [],
            "kinds": engine.store.kinds(),
            "tensors": engine.store.state(),
        }
        for engine in together.engines
    ]


def load(together: LocalWorld, states: list[dict[str, Any]]) -> None:
    for engine, state in zip(together.engines, states, strict=True):
        engine.store.check(state["tensors"], complete=True)
        engine.store.load(state["tensors"], state["kinds"])
        engine.step = state["step"]


def steps(together: LocalWorld, count: int) -> None:
    for _ in range(count):
        workers, step = len(together.engines), together.engines[0].step
        noise = [torch.Generator().manual_seed(100 * step + rank) for rank in range(workers)]
        gradients = [torch.randn(NUMEL, generator=generator) for generator in noise]
        together.average(gradients)
        assert gradients[0].isfinite().all()
        assert all(torch.equal(gradients[0], other) for other in gradients[1:])


def mean(states: list[dict[str, Any]], field: str, name: str) -> Tensor:
    return torch.stack([state["tensors"][field][name].double() for state in states]).mean(0)


def owned(states: list[dict[str, Any]], field: str, name: str) -> Tensor:
    """What all owners together have of a parameter, in its order."""
    block = int(states[0]["configuration"]["granularity"].partition(":")[2] or 0)
    shape = torch.Size(PARAMETERS[name]["shape"])  # type: ignore[arg-type]
    whole = torch.zeros(shape.numel())
    rows = states[0]["configuration"].get("shares") == "whole rows" and len(shape) > 1
    for rank, state in enumerate(states):
        unit = shape[1:].numel() if rows else block or ALIGNMENT
        low, high = shard_bounds(shape.numel(), rank, len(states), unit)
        if low == high:
            assert name not in state["tensors"].get(field, {})
        place = 0
        while low < high:
            length = min(high, (low // block + 1) * block if block else high) - low
            whole[low : low + length] = state["tensors"][field][name][place : place + length]
            low, place = low + length, aligned(place + length)
    return whole


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_nothing_owed_is_lost_and_training_goes_on(before: int, after: int) -> None:
    for case in chosen():
        old = world(case, before)
        steps(old, 3)
        states = states_of(old)
        made = gradwire.redistribute(states[::-1], after)
        assert [(state["rank"], state["world_size"]) for state in made] == [(rank, after) for rank in range(after)]
        for field, kind in states[0]["kinds"].items():
            for name in PARAMETERS:
                present = [state["tensors"][field][name] for state in states if name in state["tensors"][field]]
                if not present or kind == Kind.WORLD:
                    assert all(name not in state["tensors"].get(field, {}) for state in made)
                elif kind == Kind.MEAN:
                    owed = mean(states, field, name)
                    one_rounding = owed.abs().max().item() * torch.finfo(present[0].dtype).eps / 2
                    assert (mean(made, field, name) - owed).abs().max() <= one_rounding, (str(case), field)
                elif kind == Kind.OWNED:
                    assert torch.equal(owned(made, field, name), owned(states, field, name)), (str(case), field)
                elif kind == Kind.SHARED:
                    assert all(torch.equal(state["tensors"][field][name], present[0]) for state in made)
        new = world(case, after)
        load(new, made)
        steps(new, 2)


def test_patterns_with_segments_of_their_own() -> None:
    """What owners owe of each parameter is put together and cut as its own rule has it."""
    rules = {"m*": "efsignsgd:granularity=block:100", "*": "efsignsgd"}
    configuration: Any = configure(rules, {}, Choices(dense=EVERYTHING))
    old, new = (LocalWorld(configuration, SLOTS, workers) for workers in (3, 2))
    steps(old, 3)
    states = states_of(old)
    made = gradwire.redistribute(states, 2)
    for name in PARAMETERS:
        own = {"configuration": configuration.rule(name).describe()}
        before, after = ([{**state, **own} for state in each] for each in (states, made))
        whole = owned(before, "owner_residual", name)
        assert whole.any()
        assert torch.equal(owned(after, "owner_residual", name), whole)
    load(new, made)
    steps(new, 2)


def test_owners_of_nothing_lose_nothing_of_what_others_owe() -> None:
    """Of vectors of 24 elements the first of four owners has none."""
    slots = flat_slots([("weight", (24,)), ("bias", (24,))])
    parameters = {slot.name: {"shape": list(slot.shape), "dtype": "torch.float32"} for slot in slots}
    configuration: Any = configure("subspace:bits=0.5,route=sharded", {}, Choices())
    old = LocalWorld(configuration, slots, 4)
    old.average([torch.randn(48, generator=torch.Generator().manual_seed(rank)) for rank in range(4)])
    states = [{**state, "parameters": parameters} for state in states_of(old)]
    assert "owner_residual" not in states[0]["tensors"]
    (made,) = gradwire.redistribute(states, 1)
    for slot in slots:
        kept = [state["tensors"].get("owner_residual", {}).get(slot.name, torch.zeros(0)) for state in states]
        assert torch.cat(kept).any()
        assert torch.equal(made["tensors"]["owner_residual"][slot.name], torch.cat(kept))
    missing = [states[0], *({**state, "tensors": {}} for state in states[1:])]
    with pytest.raises(ConfigurationError, match="not all workers keep residual of 'weight'"):
        gradwire.redistribute(missing[::-1], 2)
    with pytest.raises(ConfigurationError, match="not all workers keep residual of 'weight'"):
        gradwire.redistribute([{**states[0], "tensors": {}}, *states[1:]], 2)


def test_every_field_is_of_its_kind() -> None:
    """As the documentation of redistribute() says; what is new must be thought about."""
    expected = {
        "residual": Kind.MEAN,
        "residual.velocity": Kind.MEAN,
        "residual.momentum": Kind.MEAN,
        "residual.filtered": Kind.MEAN,
        "residual.lag": Kind.MEAN,
        "residual.age": Kind.SHARED,
        "residual.estimate": Kind.SHARED,
        "owner_residual": Kind.OWNED,
        "owner_residual.filtered": Kind.OWNED,
        "owner_residual.age": Kind.SHARED,
        "delta": Kind.MEAN,
        "momentum": Kind.MEAN,
        "second_moments": Kind.MEAN,
        "p": Kind.SHARED,
        "q": Kind.SHARED,
        "moment": Kind.SHARED,
        "basis": Kind.SHARED,
        "learnt": Kind.SHARED,
        "levels": Kind.SHARED,
        "square": Kind.SHARED,
        "capacity": Kind.SHARED,
        "inceptionn.room": Kind.SHARED,
        "room": Kind.SHARED,
        "owner_room": Kind.SHARED,
        "budget": Kind.SHARED,
        "owner_budget": Kind.SHARED,
        "stages": Kind.PRIVATE,
        "regions": Kind.WORLD,
    }
    found: dict[str, str] = {}
    for case in chosen():
        together = world(case, 2)
        steps(together, 1)
        found.update(together.engines[0].store.kinds())
    assert found == expected


ESTIMATES = [
    Case("topk", {"ratio": 0.1}, "layer", "gather", "ef21"),
    Case("topk", {"ratio": 0.1}, "layer", "sharded", "ef21"),
    Case("efsignsgd", {}, "layer", "sharded", memory.Momentum(memory=memory.EF21())),
    Case("natural", {}, "layer", "sharded", "diana"),
    Case("terngrad", {}, "block:96", "gather", "diana"),
]


@pytest.mark.parametrize("case", ESTIMATES, ids=str)
def test_estimates_keep_their_law(case: Case) -> None:
    """Their mean is what everybody knows and what owners have not said yet, which are all of it once one has it all."""
    old = world(case, 3)
    steps(old, 4)
    states = states_of(old)
    for workers in (1, 2, 5):
        made = gradwire.redistribute(gradwire.redistribute(states, workers), 1)
        kept = made[0]["tensors"]
        for name in PARAMETERS:
            lag = "residual.lag" if case.memory == "diana" else "residual"
            known = kept["residual.estimate"][name].double()
            for field in ("owner_residual", "owner_residual.filtered"):
                if field in kept:
                    known += kept[field][name].double().view(known.shape)
            torch.testing.assert_close(-mean(states, lag, name), known, rtol=1e-5, atol=1e-5)


def test_momenta_of_dense_tensors_are_kept_as_those_of_compressed_ones() -> None:
    for carried, field in (("dgc", "residual.velocity"), ("momentum", "residual.momentum")):
        old = world(Case("topk", {"ratio": 0.1}, "layer", "gather", carried), 3, DensePolicy())
        steps(old, 3)
        states = states_of(old)
        made = gradwire.redistribute(states, 2)
        for name in ("vector", "crumb"):
            assert mean(states, field, name).abs().max() > 0
            torch.testing.assert_close(mean(made, field, name), mean(states, field, name))
        new = world(Case("topk", {"ratio": 0.1}, "layer", "gather", carried), 2, DensePolicy())
        load(new, made)
        steps(new, 2)


def test_there_and_back() -> None:
    """As many workers get what they had; owners' shares come back as they were from any other cut."""
    old = world(Case("efsignsgd", {}, "block:100", "sharded", "residual"), 3)
    steps(old, 2)
    states = states_of(old)
    same = gradwire.redistribute(states, 3)
    assert [state["tensors"] for state in same] == [state["tensors"] for state in states]
    for workers in (1, 2, 5, 40):
        back = gradwire.redistribute(gradwire.redistribute(states, workers), 3)
        for state, other in zip(states, back, strict=True):
            assert state["tensors"]["owner_residual"].keys() == other["tensors"]["owner_residual"].keys()
            for name, value in state["tensors"]["owner_residual"].items():
                assert torch.equal(value, other["tensors"]["owner_residual"][name])


def test_states_that_do_not_belong_together() -> None:
    old = world(Case("powersgd", {"rank": 2}, "layer", "allreduce", "residual"), 3)
    steps(old, 1)
    states = states_of(old)

    def refused(message: str, given: list[Any], workers: Any = 2) -> None:
        with pytest.raises(ConfigurationError, match=message):
            gradwire.redistribute(given, workers)

    first, second, third = states
    refused("workers=0 is out of range", states, 0)
    refused("workers=1.5 is out of range", states, 1.5)
    refused("there are no states", [])
    refused("states of ranks 0, 2; give one of each of the 3", [third, first])
    refused("states of ranks 0, 1, 1", [first, second, {**third, "rank": 1}])
    refused("rank 2 has step=7, that of rank 0 has 1", [first, second, {**third, "step": 7}])
    other = {**third, "configuration": {**third["configuration"], "rank": "4"}}
    refused("saved with rank='4', that of rank 0 has rank='2'", [first, second, other])
    refused("has no 'kinds'", [first, second, {key: third[key] for key in third if key != "kinds"}])
    tensors = {**third["tensors"], "q": {**third["tensors"]["q"], "matrix": torch.zeros(2, 48)}}
    refused("q of 'matrix' is not the same on all workers", [first, second, {**third, "tensors": tensors}])
    tensors = {**third["tensors"], "residual": {}}
    refused("not all workers keep residual of 'matrix'", [first, second, {**third, "tensors": tensors}])


def test_the_choice_of_cases_has_every_memory() -> None:
    assert {case.memory for case in cases()} | {HALF} == {case.memory for case in chosen()}
