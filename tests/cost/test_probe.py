"""What a group measures of itself."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.cost import pairs, probe
from gradwire.cost.network import KINDS, line_through
from gradwire.cost.pairs import Pair
from gradwire.cost.workload import Workload
from gradwire.errors import ConfigurationError
from gradwire.wire import ProcessGroupTransport
from pool import Pool

CPU = torch.device("cpu")


def probed() -> dict[str, tuple[float, float]]:
    found = probe.measured(ProcessGroupTransport(dist.group.WORLD), CPU, sizes=(1 << 10, 1 << 16, 1 << 18))
    return {kind: (line.latency, line.inverse_bandwidth) for kind, line in found.lines.items()}


def of_one() -> str:
    try:
        probe.measured(ProcessGroupTransport(dist.group.WORLD), CPU, probe.SIZES)
    except ConfigurationError as error:
        return str(error)
    return "measured"


def shared_by_all() -> object:
    return probe.agreed({"rank": dist.get_rank(), "text": "µ"}, ProcessGroupTransport(dist.group.WORLD), CPU)


def came() -> Workload:
    net = nn.Sequential(nn.Linear(300, 1000), nn.Linear(1000, 10))
    model = DistributedDataParallel(net, bucket_cap_mb=0.1)
    transport = ProcessGroupTransport(dist.group.WORLD)
    return probe.arrivals(model, lambda each: each(torch.ones(4, 300)).sum(), transport, steps=2)


class Halved(nn.Sequential):
    """The last bucket that DDP brings is of the first layer, in bfloat16; the others are in float32."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(300, 1000).bfloat16(), nn.Linear(1000, 300))

    def loss(self) -> torch.Tensor:
        return self(torch.ones(4, 300)).sum()

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        first, second = self
        return second(first(data.bfloat16()).float())


def stepped(way: str) -> Workload | str:
    net = Halved()
    model, transport = DistributedDataParallel(net), ProcessGroupTransport(dist.group.WORLD)
    ways = {
        "given": lambda each: each(torch.ones(4, 300)).sum(),
        "its method": lambda each: each.loss(),
        "from elsewhere": lambda _: net.loss(),
    }
    try:
        return probe.arrivals(model, ways[way], transport, steps=2)
    except ConfigurationError as error:
        return str(error)


def linked() -> list[tuple[tuple[int, int], float, float]]:
    return [(pair.ranks, pair.latency, pair.rate) for pair in pairs.measured(dist.group.WORLD, CPU)]


def test_every_two_ranks_are_measured_and_all_hear_of_it(pool: Pool) -> None:
    first, *others = pool.run(3, linked)
    assert others == [first, first]
    assert [ranks for ranks, _, _ in first] == [(0, 1), (0, 2), (1, 2)]
    assert all(latency > 0 and rate > 0 for _, latency, rate in first)


def test_the_slow_link_and_the_far_one_are_named() -> None:
    links = [Pair((0, 1), 1e-4, 1e9), Pair((0, 2), 1e-4, 1e9), Pair((1, 2), 1e-4, 2e8), Pair((0, 3), 1e-2, 1e9)]
    said = " ".join(pairs.sentences(links))
    assert "between ranks 1 and 2 is slow: 200mbit" in said
    assert "Ranks 0 and 3 are far apart: 10000 us" in said
    assert said.count("slow") == 1


def test_all_ranks_have_the_same_lines(pool: Pool) -> None:
    first, second = pool.run(2, probed)
    assert first == second
    assert set(first) == set(KINDS)
    assert all(latency >= 0 and slope >= 0 and latency + slope > 0 for latency, slope in first.values())


def test_one_worker_has_no_network(pool: Pool) -> None:
    (said,) = pool.run(1, of_one)
    assert "no network to probe" in said


def test_all_ranks_agree_on_what_the_first_has(pool: Pool) -> None:
    assert pool.run(2, shared_by_all) == [{"rank": 0, "text": "µ"}] * 2


def test_every_bucket_of_a_backward_pass_is_timed(pool: Pool) -> None:
    first, second = pool.run(2, came)
    assert first == second
    assert first.forward > 0
    assert 1 <= len(first.buckets) == len(first.backward) <= 4
    assert first.values == 300 * 1000 + 1000 + 10 * 1000 + 10
    assert all(seconds >= 0 for seconds in first.backward)


def test_gradients_of_several_types_count_as_of_the_widest(pool: Pool) -> None:
    first, second = pool.run(2, stepped, "given")
    assert first == second
    assert isinstance(first, Workload)
    assert first.dtype == torch.float32


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("its method", "in DistributedDataParallel failed: AttributeError"),
        ("from elsewhere", "left DistributedDataParallel nothing to average"),
    ],
)
def test_a_step_that_goes_by_ddp_is_told(pool: Pool, way: str, said: str) -> None:
    for each in pool.run(2, stepped, way):
        assert isinstance(each, str)
        assert said in each
        assert "has to call the model that it is given" in each


def test_a_line_goes_through_what_was_measured_and_on_as_among_the_larger_sizes() -> None:
    points = [(size, 1e-3 + 2e-9 * size) for size in (1_000, 10_000, 100_000, 1_000_000, 10_000_000)]
    line = line_through([*points[:1], (10_000, 0.5e-3), *points[2:]])  # times never fall
    assert line.seconds(10_000) == line.seconds(0) == line.latency
    assert line.inverse_bandwidth == pytest.approx(2e-9)
    assert line.seconds(500_000) == pytest.approx(1e-3 + 2e-9 * 500_000)
    assert line.seconds(1_000_000_000) == pytest.approx(1e-3 + 2e-9 * 1_000_000_000)


def test_an_interface_that_is_not_to_be_used_is_not_the_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(variable, raising=False)
    usual = pairs.interface()
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^docker0,lo")
    assert pairs.interface() == usual
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=eth7,eth8")
    assert pairs.interface() == "eth7"
