"""What methods take on the machine that they are about to be used on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gradwire.cost import group, measure, probe, shapes
from gradwire.cost.advice import Candidate, advise
from gradwire.cost.costs import FREE, Costs, Profile, Stage, key_of
from gradwire.cost.scene import Scene
from gradwire.engine.configuration import Configuration
from gradwire.errors import ConfigurationError
from gradwire.methods import LayerMethod
from gradwire.wire import AllGather, AllReduceMax, ProcessGroupTransport
from pool import Pool

CPU = torch.device("cpu")


def test_a_sample_is_of_all_parts_and_of_the_size_asked_for() -> None:
    for name in ("resnet50", "bert-large", "ncf", "tiny"):
        whole = shapes.get(name).parameters
        picked = measure.sample(whole, 1 << 18)
        assert {name for name, _ in picked} <= {name for name, _ in whole}
        assert 0 < shapes.numel(picked) <= max(2 << 18, shapes.numel(whole) // 8)
    small = [("a.weight", (3, 5)), ("a.bias", (3,)), ("b.weight", (7, 3)), ("b.bias", (7,))]
    assert [name for name, _ in measure.sample(small)] == ["a.weight", "b.weight"]
    assert [name for name, _ in measure.sample(small, 20)] == ["b.weight"]
    assert measure.sample(small[1::2]) == small[1::2]
    assert shapes.numel(measure.sample([("one", (1 << 12, 1 << 12))], 1 << 16)) == 1 << 16
    assert measure.sample([("none", (0, 3))]) == [("none", (0, 3))]


def test_every_stage_of_a_method_is_measured() -> None:
    tried = [Configuration.make(*each) for each in (("powersgd", {}), ("topk", {}), ("dense", {}))]
    found = measure.here(tried, [("matrix", (300, 200)), ("bias", (200,))], CPU)
    low, top, dense = (found.methods[key_of(each)] for each in tried)
    assert [len(each.stages) for each in (low, top, dense)] == [3, 2, 2]
    assert all(costs.seconds(0, 1, 60_000, 2) > 0 for costs in (low, top))
    only_vectors = measure.here(tried[:1], [("bias", (200,))], CPU)
    assert only_vectors.methods[key_of(tried[0])] == FREE


def merged() -> tuple[list[float], float, float]:
    transport = ProcessGroupTransport(dist.group.WORLD)
    mine = 1.0 + dist.get_rank()
    profile = Profile("here", "measured", "", methods={"topk": Costs((Stage(value=mine), Stage(row=4 - mine)))})
    found, apart = measure.slowest(profile, transport, CPU)
    stages = found.methods["topk"].stages
    return [stages[0].value, stages[1].row], apart, group.cores(transport, CPU)


def test_the_slowest_worker_counts(pool: Pool) -> None:
    first, second = pool.run(2, merged)
    assert first == second
    assert first[0] == [2.0, 3.0]
    assert first[1] == 1.0
    assert first[2] > 0


def looked(path: str, function: str = "make") -> tuple[str, float, int, list[float]]:
    tried = [Candidate.make("bf16", {}), Candidate.make("topk", {"ratio": 0.1})]
    whole = dist.new_group()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "SIZES", (1 << 10, 1 << 14))
        setting, numel, title = group.measured(Scene(f"{path}:{function}"), False, tried, whole, CPU)
    assert set(map(key_of, (each.configuration for each in tried))) < set(setting.profile.methods)
    assert setting.workload.seconds > 0
    return title, setting.workload.seconds, numel, [row.seconds for row in advise(setting, tried).rows]


def test_a_group_measures_itself_and_its_backward_pass(tmp_path: Path, pool: Pool) -> None:
    path = tmp_path / "own_step_of_a_test.py"
    path.write_text(
        "import torch\ndef make():\n    net = torch.nn.Linear(400, 90)\n"
        "    return net, lambda each: each(torch.ones(4, 400)).sum()\n"
    )
    first, second = pool.run(2, looked, str(path))
    assert first == second
    title, seconds, numel, rows = first
    assert "2 workers as they are" in title
    assert "(measured)" in title
    assert numel == 400 * 90 + 90
    assert all(each >= seconds for each in rows)


def refused(path: str, function: str) -> str:
    try:
        looked(path, function)
    except ConfigurationError as error:
        return str(error)
    return "measured"


def test_a_step_that_leaves_parameters_out_is_measured_and_one_without_a_loss_refused(
    tmp_path: Path, pool: Pool
) -> None:
    path = tmp_path / "own_steps_of_a_test.py"
    path.write_text(
        "import torch\nclass Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.used, self.left = torch.nn.Linear(40, 9), torch.nn.Linear(40, 9)\n"
        "    def forward(self, values):\n        return self.used(values)\n"
        "def part():\n    return Net(), lambda each: each(torch.ones(4, 40)).sum()\n"
        "def number():\n    return Net(), lambda each: 3.0\n"
    )
    assert all("(measured)" in title for title, *_ in pool.run(2, looked, str(path), "part"))
    for said in pool.run(2, refused, str(path), "number"):
        assert "number' failed: AttributeError: 'float' object has no attribute 'backward'; the function that" in said


@pytest.mark.parametrize("growing", [None, "segment", "row"])
def test_only_what_there_is_more_of_grows_with_workers(growing) -> None:
    """Noise that happens to grow with workers is no cost of theirs where they bring nothing."""
    rows = [(161, 25_000_000, 2), (161, 25_000_000, 5), (4, 16_000_000, 2), (4, 16_000_000, 5)]
    fit = measure._fitted(rows, [0.030, 0.033, 0.020, 0.022], growing)
    assert (fit.segment > 0, fit.row > 0) == (growing == "segment", growing == "row")
    same = fit.seconds(161, 25_000_000, 1000) == fit.seconds(161, 25_000_000, 2)
    assert same == (growing is None)
    assert measure._growing("allreduce", False) is measure._growing("gather", False) is None


spent = [0.0]


def spend(seconds: float) -> float:
    """A clock that goes on by what its caller says."""
    spent[0] += seconds
    return spent[0]


@dataclass(frozen=True)
class Gathered(LayerMethod):
    """The mean of all gradients, each of which comes to everybody, after a round that says nothing."""

    def average(self, gradient, state):
        yield AllReduceMax(gradient[:1, :1])
        payloads = yield AllGather(gradient.flatten().view(torch.uint8))
        spend(1e-9 * len(payloads) * gradient.numel())
        return payloads.view(torch.float32).mean(0).view_as(gradient)


def test_what_reads_a_payload_of_every_worker_takes_longer_with_more_of_them(monkeypatch) -> None:
    """Also where it is no route of that name: a layer method's own rounds, a route of one's own."""
    monkeypatch.setattr(measure, "clock_of", lambda device: lambda: spend(1e-9))
    noise = torch.randn(4 << 16, generator=torch.Generator().manual_seed(0))
    sampled = [("matrix", (400, 300))], [("matrix", (40, 30))]
    found = measure.costs(Configuration.make(Gathered(), {}), noise, sampled)
    first, second, last = (each.row for each in found.stages)
    assert first == second == 0
    assert last == pytest.approx(1e-9)
    assert found.seconds(2, 1, 120_000, 64) == pytest.approx(64 * 120e-6, rel=1e-3)
