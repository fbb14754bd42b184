"""The route by regions: what is applied, what stays, how much travels, and that regions outlive a restart."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire.codecs.index import EliasFano
from gradwire.engine.configuration import Configuration
from gradwire.errors import ConfigurationError, PayloadError
from gradwire.layout import flat_slots
from gradwire.local.world import LocalWorld
from gradwire.routes.regions import Regions, largest
from pool import Pool, ranks

SHAPES = {"wide": (60, 50), "deep": (20, 100)}
NUMEL, RATIO = 5000, 0.02
EVERYTHING = gradwire.DensePolicy(below=0, vectors=False)


def gradient(rank: int, step: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return {name: torch.randn(shape, generator=generator) ** 3 for name, shape in SHAPES.items()}


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensors[name].flatten() for name in SHAPES])


def attached(**options: object) -> tuple[dict[str, torch.nn.Parameter], gradwire.Synchronizer]:
    parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    options = {"ratio": RATIO, "dense": EVERYTHING, **options}
    return parameters, gradwire.Synchronizer(parameters.items(), "oktopk", **options)


def stepped(
    parameters: dict[str, torch.nn.Parameter], sync: gradwire.Synchronizer, tensors: dict[str, torch.Tensor]
) -> torch.Tensor:
    for name, parameter in parameters.items():
        parameter.grad = tensors[name].clone()
    sync.synchronize()
    return flat({name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None})


def one_step(margin: float) -> tuple[torch.Tensor, torch.Tensor, int]:
    parameters, sync = attached(margin=margin)
    average = stepped(parameters, sync, gradient(dist.get_rank()))
    result = average, flat(sync.state_dict()["tensors"]["residual"]), sync.stats().wire_bytes
    sync.close()
    return result


def top(values: torch.Tensor, count: int) -> torch.Tensor:
    chosen = values.abs().sort(descending=True, stable=True).indices[:count]
    return torch.zeros_like(values).index_copy(0, chosen, values[chosen])


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
def test_with_room_it_is_the_top_k_of_the_sum_of_top_k_sets(pool: Pool, workers: int) -> None:
    """With a margin of n everything fits, and the result is exact."""
    k = round(RATIO * NUMEL)
    results = pool.run(workers, one_step, float(workers))
    total = torch.zeros(NUMEL)
    for rank in range(workers):
        total = total + top(flat(gradient(rank)), k)
    for rank, (average, residual, _) in enumerate(results):
        assert torch.equal(average, top(total, k) * torch.tensor(1 / workers))
        own = flat(gradient(rank))
        sent = (top(own, k) != 0) & (average != 0)
        assert torch.equal(residual, torch.where(sent, 0, own))


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_fewer_than_six_k_words_travel_and_the_rest_stays(pool: Pool, workers: int) -> None:
    k = round(RATIO * NUMEL)
    results = pool.run(workers, one_step, 1.5)
    for rank, (average, residual, wire_bytes) in enumerate(results):
        assert wire_bytes < 4 * 6 * k
        assert 0 < int((average != 0).sum()) <= k
        own = flat(gradient(rank))
        assert ((residual == own) | (residual == 0)).all(), "a value is sent whole or not at all"
    put_in = sum(flat(gradient(rank)).double() for rank in range(workers))
    owed = sum(residual.double() for _, residual, _ in results)
    torch.testing.assert_close(results[0][0].double() * workers + owed, put_in, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("workers", [2, 8, 64, 1024])
def test_payloads_stay_below_six_k_words_at_any_number_of_workers(workers: int) -> None:
    k, positions = 250_000, 25_000_000
    capacity = gradwire.methods.OkTopk().capacity(k, workers)
    cut = Regions.even(positions, workers, capacity, EliasFano())
    assert 2 * (workers - 1) * cut.payload_bytes < 4 * 6 * k


def lopsided() -> torch.Tensor:
    """All of the largest values lie in the first tenth: equal widths would leave most of them waiting."""
    parameters, sync = attached(recut=2)
    tensors = gradient(dist.get_rank())
    tensors["wide"].view(-1)[:500] *= 1000
    average = stepped(parameters, sync, tensors)
    edges = sync.state_dict()["tensors"]["regions"]["wide"]
    assert int(edges[-2]) <= 500
    sync.close()
    return average


def test_regions_follow_the_values(pool: Pool) -> None:
    average = pool.run(4, lopsided)[0]
    assert int((average != 0).sum()) > 0.9 * RATIO * NUMEL


def resumed_and_not() -> list[torch.Tensor]:
    found = []
    for stop in (None, 3):
        parameters, sync = attached(recut=4)
        for step in range(6):
            if step == stop:
                state = sync.state_dict()
                sync.close()
                parameters, sync = attached(recut=4)
                sync.load_state_dict(state)
            average = stepped(parameters, sync, gradient(dist.get_rank(), step))
        sync.close()
        found.append(average)
    return found


def test_regions_outlive_a_restart(pool: Pool) -> None:
    for first, second in pool.run(3, resumed_and_not):
        assert torch.equal(first, second)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@ranks(3)
def test_a_bad_value_reaches_all_and_stays_nowhere(bad: float) -> None:
    parameters, sync = attached()
    for step in range(3):
        tensors = gradient(dist.get_rank(), step)
        if step == 1 and dist.get_rank() == 1:
            tensors["deep"][-1, -1] = bad
        average = stepped(parameters, sync, tensors)
        assert bool(average.isfinite().all()) == (step != 1)
    assert flat(sync.state_dict()["tensors"]["residual"]).isfinite().all()
    sync.close()


def test_largest_prefers_low_indices() -> None:
    assert largest(torch.tensor([1.0, -2.0, 2.0, 0.0, 2.0]), 2).tolist() == [1, 2]
    assert largest(torch.tensor([1.0, 2.0]), 5).tolist() == [0, 1]
    assert largest(torch.empty(0), 5).tolist() == []


def test_payloads_fill_up_beyond_the_region_and_bad_ones_are_refused() -> None:
    cut = Regions.even(40, 4, 3, EliasFano())
    payload = torch.empty(cut.payload_bytes, dtype=torch.uint8)
    cut.write(2, torch.tensor([21, 29]), torch.tensor([5.0, 6.0]), payload)
    relative, values = cut.read(2, payload)
    assert relative.tolist()[:2] == [1, 9]
    assert relative[2] >= cut.width(2)
    assert values.tolist() == [5.0, 6.0, 0.0]
    with pytest.raises(PayloadError):
        cut.read(2, torch.full_like(payload, 255))


@pytest.mark.parametrize("nonzero", [0, 1, 6])
def test_nothing_between_two_parameters_is_chosen(nonzero: int) -> None:
    """Parameters begin at multiples of 8 positions; here fewer sums are not zero than there is room for."""
    slots = flat_slots([("first", (3,)), ("second", (5, 7)), ("third", (11,))])
    configuration = Configuration.make("oktopk", {"ratio": 0.5}, granularity="model", dense=EVERYTHING)
    world = LocalWorld(configuration, slots, 3)
    for step in range(3):
        gradients = [torch.zeros(slots[-1].stop) for _ in range(3)]
        for number in range(nonzero):
            gradients[number % 3][(17 * number + step) % slots[-1].stop] = 1.0 + number
        mean = torch.stack(gradients).mean(0)
        world.average(gradients)
        for average in gradients:
            torch.testing.assert_close(average, mean)


def test_options_are_checked() -> None:
    for option, value in (("margin", 0.5), ("recut", 0), ("ratio", 0.0)):
        with pytest.raises(ConfigurationError, match=f"{option}={value}"):
            gradwire.methods.OkTopk(**{option: value})
