"""A step in simulated time: what it sends is what is really sent, what it takes is what formulas say."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from catalogue import cases
from gradwire import methods
from gradwire.cost import shapes
from gradwire.cost.clock import Clock, Cost, shared
from gradwire.cost.costs import FREE, Costs, Profile, Stage
from gradwire.cost.network import KINDS, Level, Line, Links, Measured
from gradwire.cost.simulation import Prediction, Setting, Worker, plain, simulate
from gradwire.cost.workload import BUCKET_BYTES, FIRST_BUCKET_BYTES, Workload, bucketed
from gradwire.engine.configuration import Configuration
from gradwire.errors import ConfigurationError
from gradwire.layout import flat_slots
from gradwire.local.world import LocalWorld
from gradwire.methods.families import FAMILIES
from models import SHAPES, gradient

SLOTS = flat_slots(list(SHAPES.items())[::-1])
DATA = {*FAMILIES["as many as the data asks for"], "3lc", "inceptionn"}
"""Methods whose later payloads are as large as the data wants."""


class Free(Profile):
    """A device on which nothing takes time."""

    def of(self, configuration: Configuration) -> tuple[Costs, str]:
        return FREE, ""


def no_profile() -> Profile:
    return Free("none", "computed", "")


def setting(workers: int, rate: float = 1e9, latency: float = 0.0, **others) -> Setting:
    alone = Workload((SLOTS,), (0.0,), 0.0)
    return Setting(alone, Links((Level(workers, rate, latency),), efficiency=1.0), no_profile(), **others)


@pytest.mark.parametrize("name", [name for name in methods.names() if name != "oktopk"])
def test_what_it_sends_is_what_is_sent(name: str) -> None:
    """The meter counts in simulated time what it counts in a world of workers, at all granularities and routes."""
    workers, compared = 3, 0
    for case in cases(methods.get(name).memory):
        if case.method != name:
            continue
        configuration = Configuration.make(case.method, case.options, *case.choices)
        worker = Worker(configuration, setting(workers))
        world = LocalWorld(configuration, SLOTS, workers)
        for step in range(1 if name in DATA or "entropy" in str(case.options) else 2):
            gradients = [
                torch.cat([gradient(slot.name, rank, step).flatten() for slot in SLOTS]) for rank in range(workers)
            ]
            assert worker.step().wire_bytes == world.average(gradients).sent_bytes, f"{case}, step {step}"
            compared += 1
    assert compared


def test_a_method_whose_payload_depends_on_answers_says_so() -> None:
    with pytest.raises(ConfigurationError, match="oktopk cannot be simulated"):
        Worker(Configuration.make("oktopk", {"ratio": 0.05}), setting(3)).step()


def test_buckets_are_those_of_ddp() -> None:
    """By the function that DDP's reducer calls itself, of parameters as they arrive."""
    for name in ("resnet50", "gpt2", "vgg16", "tiny"):
        parameters = shapes.get(name).parameters
        arriving = [torch.empty(shape, device="meta") for _, shape in reversed(parameters)]
        limits = [FIRST_BUCKET_BYTES, BUCKET_BYTES]
        theirs, _ = dist._compute_bucket_assignment_by_size(arriving, limits, [False] * len(arriving))
        assert [len(bucket) for bucket in bucketed(parameters)] == [len(indices) for indices in theirs]


def of_resnet(workers: int, rate: float, latency: float = 50e-6, step: float = 0.0, **others) -> Setting:
    links = Links((Level(workers, rate, latency),), efficiency=1.0)
    return Setting(Workload.of(shapes.get("resnet50"), step), links, no_profile(), **others)


@pytest.mark.parametrize("workers", [1, 2, 5, 64, 1000])
def test_dense_is_the_formula_of_the_ring(workers: int) -> None:
    """``2 (n - 1) / n b beta`` and ``2 (n - 1) alpha`` for each collective, bytes rounded down to whole ones."""
    rate, latency = 1e9, 50e-6
    where = of_resnet(workers, rate, latency)
    expected = sum(
        8 * 2 * (workers - 1) / workers * 4 * bucket[-1].stop / rate + 2 * (workers - 1) * latency
        for bucket in where.workload.buckets
    )
    assert plain(where).seconds == pytest.approx(expected, rel=1e-9)
    one = Configuration.make("dense", {}, granularity="model")
    alone = 8 * 2 * (workers - 1) / workers * 4 * where.workload.values / rate + 2 * (workers - 1) * latency
    assert simulate(one, where).seconds == pytest.approx(alone, rel=1e-9)


def test_routes_are_their_formulas() -> None:
    """Gather takes ``(n - 1) b beta``, sharded twice ``(n - 1) / n b beta``, latency aside; break-even at n = 2."""
    for workers in (2, 4, 16):
        where = of_resnet(workers, 1e8, latency=0.0)
        dense = 4 * where.workload.values
        took = {}
        for route in ("gather", "sharded"):
            prediction = simulate(Configuration.make("signsgd", {}, route=route), where)
            assert prediction.seconds == pytest.approx(8 * prediction.wire_bytes / 1e8, rel=1e-6)
            took[route] = prediction.seconds
        assert took["gather"] / took["sharded"] == pytest.approx(workers / 2, rel=0.05)
        assert took["sharded"] < 8 * dense / 1e8


def test_faster_links_and_fewer_workers_never_take_longer() -> None:
    for name in ("dense", "efsignsgd", "topk"):
        configuration = Configuration.make(name, {})
        rates = [simulate(configuration, of_resnet(8, rate, step=0.1)).seconds for rate in (1e8, 1e9, 1e10, 1e11)]
        assert rates == sorted(rates, reverse=True)
        sizes = [simulate(configuration, of_resnet(n, 1e9, step=0.1)).seconds for n in (1, 2, 8, 32)]
        assert sizes == sorted(sizes)
        slow = [simulate(configuration, of_resnet(8, 1e9, step=0.1, slowest=s)).seconds for s in (1.0, 1.5, 3.0)]
        assert slow == sorted(slow)


def test_time_scales_with_everything_that_takes_it() -> None:
    """Links ten times as slow, latencies and steps ten times as long: ten times the time, and to the last bucket."""
    configuration = Configuration.make("efsignsgd", {})
    quick = simulate(configuration, of_resnet(8, 1e10, 1e-5, step=0.03))
    slow = simulate(configuration, of_resnet(8, 1e9, 1e-4, step=0.3))
    assert slow.seconds == pytest.approx(10 * quick.seconds, rel=1e-9)
    assert slow.wire_bytes == quick.wire_bytes


def test_bounds_are_the_steps_of_methods_and_links_that_are_as_much_faster_and_slower() -> None:
    """Of all that was measured; how long backward takes is given."""
    configuration = Configuration.make("efsignsgd", {})

    def step(factor: float, spread: float = 0.0) -> Prediction:
        costs = Costs((Stage(value=factor * 1e-9), Stage(value=factor * 2e-9)), spread)
        return Worker(configuration, of_resnet(8, 1e9 / factor, factor * 1e-4, step=0.1, cores=1.5), costs).step()

    found = step(1.0, spread=0.2)
    for factor, seconds in ((0.8, found.low), (1.0, found.seconds), (1.2, found.high)):
        assert step(factor).seconds == pytest.approx(seconds, rel=1e-9)


def test_nothing_is_hidden_without_backward_and_everything_behind_a_long_one() -> None:
    quick = simulate(Configuration.make("acpsgd", {}), of_resnet(8, 1e9))
    assert quick.exposed == pytest.approx(quick.seconds)
    hidden = simulate(Configuration.make("acpsgd", {}), of_resnet(8, 1e9, step=10.0))
    assert hidden.exposed < quick.exposed / 2  # the last bucket's is left


def test_a_thousand_workers_are_no_more_work_than_one() -> None:
    where = of_resnet(1000, 1e10, step=0.1)
    assert where.network.workers == 1000
    assert simulate(Configuration.make("efsignsgd", {}), where).seconds > 0.1


def test_cores_are_shared_in_equal_parts_none_larger_than_wanted() -> None:
    assert shared([1.0, 1.0, 0.0], 4.0) == [1.0, 1.0, 0.0]
    assert shared([1.0, 1.0, 0.2], 1.0) == pytest.approx([0.4, 0.4, 0.2])
    assert shared([1.0, 1.0, 1.0], 1.5) == pytest.approx([0.5, 0.5, 0.5])


def test_what_runs_at_once_takes_the_time_that_its_cores_allow() -> None:
    """Two seconds of backward and one of encoding: two seconds on two cores, three on one."""
    for cores, seconds in ((2.0, 2.0), (1.0, 3.0)):
        clock = Clock(cores)
        clock.backward([2.0])
        clock.compute("encode", 0, 0, 1.0)
        clock.until_ready(0)
        assert clock.now == pytest.approx(seconds)
    clock = Clock(1.0)
    first, second = clock.send(Cost(1.0), (0, 0)), clock.send(Cost(1.0, work=1.0), (1, 0))
    clock.compute("encode", 0, 0, 1.5)  # beside half a second of the second transfer, which takes a core as well
    assert clock.now == pytest.approx(2.0)
    clock.until_there(second)
    assert first.left == 0
    assert clock.now == pytest.approx(2.5)
    assert clock.waited == pytest.approx(0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_of_plain_ddp_take_as_long_as_those_of_its_type(dtype: torch.dtype) -> None:
    """Backends may add two-byte numbers up slowly, which is probed by itself."""
    usual, slowly = (Line([(0, 0.0), (1 << 30, pace * (1 << 30))]) for pace in (1e-9, 5e-9))
    network = Measured(2, {kind: slowly if kind == "half all-reduce" else usual for kind in KINDS})
    workload = Workload((SLOTS,), (0.0,), 0.0, dtype)
    row = plain(Setting(workload, network, no_profile()))
    assert row.wire_bytes == dtype.itemsize * workload.values
    assert row.seconds == pytest.approx(row.wire_bytes * (5e-9 if dtype.itemsize == 2 else 1e-9))
