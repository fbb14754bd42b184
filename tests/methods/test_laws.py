"""Laws over every method in the catalogue."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

import gradwire
from catalogue import OPTIONS, cases
from flat_world import FIRSTS, PLACES, ROUNDING, SLOTS, averaged, gradients_of, on_a_network, world_of
from gradwire import methods
from gradwire.engine.configuration import Configuration
from gradwire.layout import ALIGNMENT, flat_slots, shard_bounds
from gradwire.local.world import LocalWorld
from gradwire.policy import DensePolicy
from models import SHAPES
from pool import Pool
from together import together


def owed(world: LocalWorld) -> torch.Tensor:
    """What compression has not sent: the mean of workers' residuals, and what owners kept back."""
    total, workers = torch.zeros(SLOTS[-1].stop, dtype=torch.float64), len(world.engines)
    for engine, name in product(world.engines, PLACES):
        choice = engine.configuration
        if (residual := engine.store.get("residual", name)) is not None:
            total[PLACES[name]] += residual.double().flatten() / workers
        kept = engine.store.get("owner_residual", name)
        if kept is not None and choice.route == "gather":
            total[PLACES[name]] += kept.double().flatten() / workers
        elif kept is not None:
            unit = choice.granularity.unit(SHAPES[name]) or ALIGNMENT
            low, high = shard_bounds(math.prod(SHAPES[name]), engine.rank, workers, unit)
            total[PLACES[name]][low:high] += kept[: high - low].double()
    return total


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_average_plus_residual_is_the_mean_of_what_was_put_in(workers: int) -> None:
    """At every step, and it is the same on every rank."""
    for case in cases("residual"):
        if (case.method, case.options.get("bits"), workers) == ("globalqsgd", 4, 5):
            continue  # refused: sums of five workers' codes leave one level a side
        world = world_of(case, workers)
        put_in, came_out = torch.zeros(2, SLOTS[-1].stop, dtype=torch.float64)
        for step in range(3):
            gradients = gradients_of(workers, step)
            put_in += torch.stack(gradients).double().mean(0)
            came_out += averaged(world, gradients).double()
            rest = owed(world)
            sizes, errors = torch.stack((put_in, came_out, rest)).abs(), (came_out + rest - put_in).abs()
            for name, place in PLACES.items():
                scale, off = 1 + float(sizes[:, place].max()), float(errors[place].max())
                assert off < ROUNDING.get(case.method, 1e-5) * scale, (str(case), name, off)


@pytest.mark.parametrize("workers", [3, 4])
def test_every_rank_has_the_same_bits(workers: int) -> None:
    """Those with error feedback are compared above."""
    for case in cases():
        if case.memory != "residual":
            world = world_of(case, workers)
            for step in range(3):
                averaged(world, gradients_of(workers, step))


def test_a_network_gives_the_bits_of_a_world_in_one_process(pool: Pool) -> None:
    """Two workers, whose sums have one order only; each method's first attachment on each of its routes."""
    for case, *ranks in zip(FIRSTS, *pool.run(2, on_a_network, FIRSTS, {}), strict=True):
        world = world_of(case, 2)
        for step, averages in enumerate(zip(*ranks, strict=True)):
            expected = averaged(world, gradients_of(2, step))
            for average in averages:
                assert torch.equal(average, expected), (str(case), step)


BAD = {1: float("inf"), 3: float("nan")}
"""Steps in which one value of every parameter is bad on one rank."""


def test_a_gradient_that_is_not_finite_reaches_every_rank_and_no_memory() -> None:
    for case in cases():
        if case.granularity != methods.get(case.method).granularities[0]:
            continue
        world = world_of(case, 2)
        for step in range(5):
            gradients = gradients_of(2, step)
            if step in BAD:
                for name, place in PLACES.items():
                    if SHAPES[name]:
                        gradients[1][place][-1] = BAD[step]
            world.average(gradients)
            for average in gradients:
                finite = {name: bool(average[place].isfinite().all()) for name, place in PLACES.items()}
                if step not in BAD:
                    assert all(finite.values()), (str(case), finite, step)
                elif case.granularity == "layer":
                    assert not any(finite[name] for name, shape in SHAPES.items() if shape), (str(case), finite, step)
                else:  # one segment holds them all, and it is enough that the step is seen to be bad
                    assert not all(finite.values()), (str(case), finite, step)
        for engine in world.engines:
            for field, tensors in engine.store.state().items():
                for name, tensor in tensors.items():
                    assert tensor.isfinite().all(), (str(case), field, name)


@pytest.mark.parametrize("name", methods.names())
def test_owners_of_nothing_change_no_average(name: str) -> None:
    """More workers than a bucket's tensors have shares: the first options of each method, on each of its routes."""
    slots = flat_slots([("vector", (11,))])
    first = next(iter(OPTIONS.get(name, [{}])))
    for route in methods.get(name).routes:
        choice = Configuration.make(name, first, route=route, dense=DensePolicy(below=0, vectors=False))
        world, gradients = LocalWorld(choice, slots, 5), [torch.full((11,), 0.5) for _ in range(5)]
        averaged(world, gradients)
        assert gradients[0].isfinite().all(), route


VECTOR = torch.randn(4001, generator=torch.Generator().manual_seed(5))


def test_topk_is_contractive_and_exact() -> None:
    decoded = gradwire.roundtrip(VECTOR, "topk", ratio=0.1).decoded
    kept = round(0.1 * VECTOR.numel())
    assert int((decoded != 0).sum()) == kept
    assert torch.equal(decoded[decoded != 0], VECTOR[decoded != 0])
    left = (VECTOR - decoded).square().sum()
    assert left <= (1 - kept / VECTOR.numel()) * VECTOR.square().sum()
    assert (VECTOR - decoded).abs().max() <= decoded[decoded != 0].abs().min()


def test_sign_is_contractive_with_its_own_constant() -> None:
    decoded = gradwire.roundtrip(VECTOR, "efsignsgd").decoded
    delta = VECTOR.abs().sum().square() / (VECTOR.numel() * VECTOR.square().sum())
    left = (VECTOR - decoded).square().sum()
    torch.testing.assert_close(left, (1 - delta) * VECTOR.square().sum(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        ("dense", {}, 4 * 1000),
        ("fp16", {}, 2 * 1000),
        ("bf16", {}, 2 * 1000),
        ("efsignsgd", {}, 1000 // 8 + 3 + 4),
        ("qsgd", {"bits": 2, "granularity": "block:128"}, 1000 // 4 + 2 + 8 * 4),
        ("qsgd", {"bits": 4}, 1000 // 2 + 2 * 4),
        ("qsgd", {"bits": 8}, 1000 + 2 * 4),
        ("topk", {"ratio": 0.1, "indices": "raw"}, 100 * 8),
        ("topk", {"ratio": 0.1, "values": "fp16", "indices": "raw"}, 100 * 6),
        ("randomk", {"ratio": 0.1}, 100 * 4),
    ],
)
def test_wire_size_is_exact(method: str, options: dict[str, object], expected: int) -> None:
    size = gradwire.roundtrip(torch.randn(1000), method, **options).wire_bytes
    assert expected - 3 <= size <= expected + 3, "payloads are whole multiples of 4 bytes"
    assert size % 4 == 0


@pytest.mark.parametrize(("method", "factor"), [("acpsgd", (40,)), ("powersgd", (40, 60))])
def test_low_rank_wire_size_is_that_of_its_factors(method: str, factor: tuple[int, ...]) -> None:
    size = gradwire.roundtrip(torch.randn(40, 60), method, rank=3).wire_bytes
    assert size == 4 * 3 * sum(factor)


def test_elias_fano_needs_at_most_two_bits_above_the_log() -> None:
    size = gradwire.roundtrip(torch.randn(1_000_000), "topk", ratio=0.01, values="fp16").wire_bytes
    assert 8 * size / 10_000 <= 16 + 2 + 6.65


@together("shape", [(1,), (), (7,), (1, 1), (3, 1), (1, 5), (2, 2)])
@pytest.mark.parametrize("name", methods.names())
def test_tiny_tensors_come_back(name: str, shape: tuple[int, ...]) -> None:
    for value in (0.0, -0.0, 1e-42, 3e38, -1.5):
        tensor = torch.full(shape, value)
        back = gradwire.roundtrip(tensor, name)
        assert back.decoded.shape == tensor.shape
        overflows = name == "fp16" or (name == "demo" and value == 3e38)  # which adds up values in its transform
        assert back.decoded.isfinite().all() or overflows, (name, value)
