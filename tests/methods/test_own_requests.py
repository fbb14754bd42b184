"""What a method of one's own may ask for: lists of requests, none at all, and what it sends stays its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire import ConfigurationError
from gradwire.attach.rehearsal import rehearse
from gradwire.engine.configuration import Configuration
from gradwire.layout import flat_slots
from gradwire.local.world import LocalWorld
from gradwire.methods import LayerMethod, LayerState
from gradwire.wire import AllGather, AllReduceMax, AllReduceMean, AllReduceSum, AllToAll, Broadcast, Exchange

EVERYTHING = gradwire.DensePolicy(below=0, vectors=False)
TWO = (("first", (6, 4)), ("second", (5,)))

Body = Callable[[Tensor, LayerState], Any]


def mine(body: Body) -> LayerMethod:
    """A method with this body."""
    kind: Any = type("Mine", (LayerMethod,), {"average": lambda self, gradient, state: body(gradient, state)})
    made: LayerMethod = dataclass(frozen=True)(kind)()
    return made


def averages(body: Body, shapes: Any, steps: int = 3) -> tuple[list[Tensor], list[Tensor]]:
    """What steps of two workers leave on rank 0, and the means of what was given."""
    slots = flat_slots(shapes)
    world = LocalWorld(Configuration.make(mine(body), {}, dense=EVERYTHING), slots, 2)
    left, means = [], []
    for step in range(steps):
        noise = [torch.Generator().manual_seed(5 * step + rank) for rank in range(2)]
        gradients = [torch.randn(40, generator=each)[: slots[-1].stop].clone() for each in noise]
        means.append(torch.stack(gradients).mean(0))
        world.average(gradients)
        assert torch.equal(*gradients)
        left.append(gradients[0])
    return left, means


def remembers_its_own(gradient: Tensor, state: LayerState) -> Any:
    """A worker's own momentum, which is sent and then kept."""
    momentum = gradient + 0.5 * state.get("momentum", torch.zeros_like(gradient))
    average = yield AllReduceMean(momentum)
    state["momentum"] = momentum
    largest = yield AllGather(momentum.abs().max().reshape(1).view(torch.uint8))
    return average + largest.view(torch.float32).max()


def test_what_was_sent_is_the_workers_own_whether_or_not_it_travelled_alone() -> None:
    alone, together = averages(remembers_its_own, TWO[:1])[0], averages(remembers_its_own, TWO)[0]
    for one, both in zip(alone, together, strict=True):
        assert torch.equal(one, both[: one.numel()])


def by_lists(gradient: Tensor, state: LayerState) -> Any:
    """The mean in a list of requests of two kinds, after none, and after a list without any."""
    assert (yield []) == []
    values = gradient.flatten()
    half, rest = yield [AllReduceMean(values[::2]), AllGather(values[1::2].contiguous().view(torch.uint8))]
    if state.step % 2 == 0:
        assert (yield []) == []
    average = torch.empty_like(values)
    average[::2], average[1::2] = half, rest.view(torch.float32).mean(0)
    return average.view_as(gradient)


def none_at_all(gradient: Tensor, state: LayerState) -> Any:
    """Requests in the first step only."""
    for mean in (yield [AllReduceMean(gradient)] * (state.step == 0)):
        return mean
    return torch.zeros_like(gradient)


def test_a_list_of_requests_has_a_list_of_answers() -> None:
    left, means = averages(by_lists, TWO)
    torch.testing.assert_close(left, means)


def test_who_asks_for_nothing_in_a_step_is_seen_to_its_end() -> None:
    left, means = averages(none_at_all, TWO)
    torch.testing.assert_close(left, [means[0], torch.zeros(29), torch.zeros(29)])


def largest_three(gradient: Tensor, state: LayerState) -> Any:
    """Values of four bytes, and indices of eight, of which others' lie in the same collective."""
    indices = gradient.flatten().abs().topk(3).indices
    values = gradient.flatten()[indices]
    rows, where = yield [AllGather(values.view(torch.uint8)), AllGather(indices.view(torch.uint8))]
    average = torch.zeros(gradient.numel())
    for value, index in zip(rows.view(torch.float32), where.view(torch.int64), strict=True):
        average[index] += value / state.world_size
    return average.view_as(gradient)


@pytest.mark.parametrize("workers", [1, 2])
def test_bytes_are_read_as_any_type_by_any_number_of_workers(workers: int) -> None:
    slots = flat_slots(TWO)
    world = LocalWorld(Configuration.make(mine(largest_three), {}, dense=EVERYTHING), slots, workers)
    gradients = [torch.randn(29, generator=torch.Generator().manual_seed(rank)) for rank in range(workers)]
    wanted = torch.zeros(29)
    for gradient in gradients:
        for slot in slots:
            part = gradient[slot.offset : slot.stop]
            wanted[slot.offset : slot.stop] += torch.where(part.abs() >= part.abs().topk(3).values[-1], part, 0)
    world.average(gradients)
    torch.testing.assert_close(gradients[0], wanted / workers)


def nothing(gradient: Tensor, state: LayerState) -> Any:
    return (yield)


def one_row(gradient: Tensor, state: LayerState) -> Any:
    yield AllToAll(gradient.flatten().view(torch.uint8).unsqueeze(0))


def as_int16(gradient: Tensor, state: LayerState) -> Any:
    yield AllReduceSum(gradient.to(torch.int16))


def largest_of_int16(gradient: Tensor, state: LayerState) -> Any:
    yield AllReduceMax(gradient.to(torch.int16))


def first_of_int16(gradient: Tensor, state: LayerState) -> Any:
    yield Broadcast(gradient.to(torch.int16), 0)


def as_float8(gradient: Tensor, state: LayerState) -> Any:
    yield AllReduceMean(gradient.to(torch.float8_e5m2))


def after_the_last(gradient: Tensor, state: LayerState) -> Any:
    yield Exchange(gradient.flatten().view(torch.uint8), state.rank + 1)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (nothing, "a method yielded NoneType; yield a request or a list of requests"),
        (one_row, "AllToAll was given 1 rows among 2 workers; give it a row for each rank"),
        (after_the_last, "Exchange names rank 2 among 2 workers; choose one from 0 to 1"),
        (lambda gradient, state: (yield Broadcast(gradient, -1)), "Broadcast names rank -1 among 2 workers"),
        (as_int16, r"AllReduceSum was given torch.int16, \(72, 48\); give it int8, uint8, int32 or int64"),
        (largest_of_int16, r"AllReduceMax was given torch.int16, \(72, 48\); give it float32, float64, "),
        (first_of_int16, r"Broadcast was given torch.int16, \(72, 48\); give it what collectives know"),
        (as_float8, r"AllReduceMean was given torch.float8_e5m2, \(72, 48\); give it float32, float64, float16"),
    ],
)
def test_what_cannot_be_asked_for_is_told(body: Body, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        rehearse(Configuration.make(mine(body), {}))


def added_up(gradient: Tensor, state: LayerState) -> Any:
    """Everybody's gradients, which are not divided by how many there are."""
    rows = yield AllGather(gradient.reshape(-1).view(torch.uint8))
    return rows.contiguous().view(torch.float32).sum(0).view_as(gradient)


def added_up_by_chance(gradient: Tensor, state: LayerState) -> Any:
    """The same of an unbiased half of them."""
    kept = torch.rand(gradient.shape, generator=state.generator()) < 0.5
    return (yield from added_up(torch.where(kept, 2 * gradient, 0 * gradient), state))


@pytest.mark.parametrize(("body", "bias"), [(added_up, "exact"), (added_up_by_chance, "unbiased")])
def test_a_check_finds_sums_in_place_of_means(body: Body, bias: str) -> None:
    """Of one worker they are the same."""
    kind: Any = type(mine(body))
    kind.bias = bias
    (finding,) = (each for each in gradwire.check(kind()).findings if each.law == f"{bias}, as declared")
    assert finding.holds is False
    assert "3 workers" in finding.said
