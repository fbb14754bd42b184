"""Two-level averages: what a node's workers share is a smaller model, averaged between nodes as any model would be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from catalogue import Case, cases
from flat_world import FIRSTS, PLACES, ROUNDING, SLOTS, averaged, configured, gradients_of
from gradwire.engine import DensePolicy
from gradwire.engine.configuration import Configuration
from gradwire.engine.nodes import Inside, Nodes
from gradwire.errors import ConfigurationError
from gradwire.layout import aligned, flat_slots
from gradwire.local.world import LocalWorld
from gradwire.routes import Shares
from models import SHAPES

EVERYTHING = DensePolicy(below=0, vectors=False)


def node_means(gradients: list[Tensor], size: int) -> list[Tensor]:
    return [torch.stack(gradients[first : first + size]).mean(0) for first in range(0, len(gradients), size)]


def rows(values: Tensor, name: str, nodes: Nodes, place: int) -> Tensor:
    first, stop = nodes.rows(SHAPES[name][0], place)
    return values[PLACES[name]].view(SHAPES[name])[first:stop].flatten()


class Rows:
    """One place of every node, as if it had nothing but its rows: a flat world with a worker a node."""

    def __init__(self, case: Case, nodes: Nodes, place: int) -> None:
        configuration = configured(case, dense=EVERYTHING)
        takes = configuration.method.accepts
        cut = [
            slot
            for slot in SLOTS
            if configured(case).compresses(slot.shape)
            and (parts := nodes.parts(slot.shape))
            and all(takes(part) for part in parts)
        ]
        self.nodes, self.place = nodes, place
        self.slots = Shares.cut(cut, nodes.rows, place, nodes.workers, nodes.dtype).own
        self.world = LocalWorld(replace(configuration, seed=place << 32), self.slots, nodes.count)

    def check(self, means: list[Tensor], average: Tensor) -> None:
        """Averages the nodes' means, and compares its rows of another average."""
        parts = [torch.zeros(aligned(self.slots[-1].stop)) for _ in means]
        for part, mean in zip(parts, means, strict=True):
            for slot in self.slots:
                part[slot.offset : slot.stop] = rows(mean, slot.name, self.nodes, self.place)
        alone = averaged(self.world, parts)
        for slot in self.slots:
            theirs = rows(average, slot.name, self.nodes, self.place)
            assert torch.equal(theirs, alone[slot.offset : slot.stop]), (self.world.engines[0].configuration, slot)


@pytest.mark.parametrize(("count", "size"), [(2, 2), (1, 3), (3, 2), (2, 3)])
def test_a_place_has_the_bits_of_a_world_of_its_rows(count: int, size: int) -> None:
    """Whatever the method: the nodes' means are averaged as by workers who have those rows and nothing else."""
    nodes = Nodes(count, size)
    for case in FIRSTS:
        grid = LocalWorld(configured(case, inside=size), SLOTS, count * size)
        places = [Rows(case, nodes, place) for place in range(size)]
        for step in range(3):
            gradients = gradients_of(count * size, step)
            means = node_means(gradients, size)
            average = averaged(grid, gradients)
            for place in places:
                place.check(means, average)


def owed(world: LocalWorld, nodes: Nodes) -> Tensor:
    """What compression has not sent: of what is shared each place's mean over nodes; of the rest that over all."""
    total, workers = torch.zeros(SLOTS[-1].stop, dtype=torch.float64), len(world.engines)
    for rank, engine in enumerate(world.engines):
        kept = engine.store.state()
        for name, residual in [*kept.get("residual", {}).items(), *kept.get("owner_residual", {}).items()]:
            whole = total[PLACES[name]].view(SHAPES[name])
            if residual.shape == SHAPES[name]:
                whole += residual.double() / workers
            else:
                first, stop = nodes.rows(SHAPES[name][0], nodes.place(rank))
                whole[first:stop] += residual.double() / nodes.count
    return total


def test_average_plus_residual_is_the_mean_of_what_was_put_in() -> None:
    """With error feedback, at every step."""
    nodes = Nodes(2, 2)
    for case in cases("residual"):
        if case.route == "sharded":
            continue  # whose owners keep something, too; its bits are compared above
        world, put_in, came_out = LocalWorld(configured(case, inside=2), SLOTS, 4), 0.0, 0.0
        for step in range(3):
            gradients = gradients_of(4, step)
            put_in += torch.stack(gradients).double().mean(0)
            came_out += averaged(world, gradients).double()
            rest = owed(world, nodes)
            off = float((came_out + rest - put_in).abs().max())
            scale = 1 + float(put_in.abs().max())
            assert off < ROUNDING.get(case.method, 1e-5) * scale, (str(case), off)


@pytest.mark.parametrize("following", ["dense", "powersgd:rank=8"])
def test_what_is_owed_comes_whatever_takes_the_methods_place(following: str) -> None:
    """Of every place's rows, once; at rank 8 a part of ``conv`` is too small, and all workers take the whole."""
    after = Configuration.make(following, {}, inside=2)
    for case in cases("residual"):
        before = configured(case, inside=2)
        if before.owner is not None or case.granularity == "model":
            continue
        world, put_in, came_out = LocalWorld(before, SLOTS, 4), 0.0, 0.0
        for configuration in (None, None, after, Configuration.make("dense", {}, inside=2)):
            if configuration is not None:
                for engine in world.engines:
                    engine.change(configuration)
            gradients = gradients_of(4, world.engines[0].step)
            put_in += torch.stack(gradients).double().mean(0)
            came_out += averaged(world, gradients).double()
        off, scale = float((came_out - put_in).abs().max()), 1 + float(put_in.abs().max())
        assert off < ROUNDING.get(case.method, 1e-5) * scale, (str(case), off)


def test_bytes_between_nodes_fall_by_the_workers_of_a_node() -> None:
    """Signs of 2 nodes of 4: between nodes every place sends its rows alone; within, all rows there and back."""
    shapes = {"first": (64, 64), "second": (128, 32)}
    slots = flat_slots(list(shapes.items()))
    sent = {}
    for inside in (None, 4, "4:bf16"):
        configuration = Configuration.make("efsignsgd", {}, route="gather", inside=inside)
        world = LocalWorld(configuration, slots, 8)
        world.average([torch.randn(8192) for _ in range(8)])
        meter = world.engines[0].meter
        sent[inside] = meter.wire_bytes, meter.node.wire_bytes
    assert sent[None] == (7 * (8192 // 8 + 2 * 4), 0)
    assert sent[4] == (8192 // 4 // 8 + 2 * 4, 2 * 3 * 8192 // 4 * 4)
    assert sent["4:bf16"] == (sent[4][0], sent[4][1] // 2)
    dense = LocalWorld(Configuration.make("dense", {}, inside=4), slots, 8)
    dense.average([torch.randn(8192) for _ in range(8)])
    meter = dense.engines[0].meter
    assert meter.wire_bytes == meter.dense_bytes == 8192


def test_half_precision_within_nodes_rounds_there_and_nowhere_else() -> None:
    slots = flat_slots([("weight", (64, 64))])
    gradients = [torch.randn(4096) for _ in range(4)]
    mean = torch.stack(gradients).mean(0)
    world = LocalWorld(Configuration.make("dense", {}, inside="2:bf16"), slots, 4)
    average = averaged(world, gradients)
    assert torch.equal(average, average.bfloat16().float())
    assert bool(((average - mean).abs() <= 2**-7 * torch.stack(gradients).abs().amax() + 2**-8).all())


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("inside", [2, "2:bf16"])
def test_what_is_not_finite_is_not_finite_everywhere_and_is_not_remembered(inside: int | str, value: float) -> None:
    for case in FIRSTS:
        if case.memory != "residual":
            continue
        world = LocalWorld(configured(case, inside=inside), SLOTS, 4)
        averaged(world, gradients_of(4, 0))
        gradients = gradients_of(4, 1)
        gradients[3][PLACES["tall"]][1500] = value
        assert not averaged(world, gradients)[PLACES["tall"]].isfinite().all(), str(case)
        for engine in world.engines:
            for field, kept in engine.store.state().items():
                assert all(each.isfinite().all() for each in kept.values() if each.is_floating_point()), (case, field)


def test_tensors_of_too_few_rows_are_compressed_among_all() -> None:
    """Of three rows four workers cannot have one each; the method takes them as without nodes."""
    slots = flat_slots([("wide", (3, 800)), ("matrix", (40, 60))])
    world = LocalWorld(Configuration.make("efsignsgd", {}, route="gather", inside=4), slots, 8)
    flat_world = LocalWorld(Configuration.make("efsignsgd", {}, route="gather"), slots[:1], 8)
    gradients = [torch.randn(slots[-1].stop) for _ in range(8)]
    alone = [each[:2400].clone() for each in gradients]
    assert torch.equal(averaged(world, gradients)[:2400], averaged(flat_world, alone))
    assert world.engines[0].store.get("residual", "wide").shape == (3, 800)  # type: ignore[union-attr]
    assert world.engines[0].store.get("residual", "matrix").shape == (10, 60)  # type: ignore[union-attr]


def torchrun(rank: int, started: int = 2) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank % started), "LOCAL_WORLD_SIZE": str(started)}


def test_nodes_are_what_torchrun_started() -> None:
    node = Inside.parse("node:bf16")
    assert str(node.of(range(8), torchrun(5, 4))) == "2 nodes of 4, which average in bfloat16 inside"
    assert Inside.parse("node").of([0, 1, 4, 5], torchrun(5, 4)) == Nodes(2, 2)  # a group of half of each node
    assert Inside.parse("node").of([1, 3, 5], torchrun(3)) == Nodes(3, 1)  # one of each, such as replicas of a shard
    assert Inside.parse(4).of(range(8)) == Inside.parse("4").of(range(8)) == Nodes(2, 4)
    nodes = Nodes(3, 2)
    assert (nodes.mates(3), nodes.peers(3), nodes.place(3), nodes.node(3)) == ([2, 3], [1, 3, 5], 1, 1)
    assert nodes.parts((5, 7)) == [(2, 7), (3, 7)]
    assert nodes.parts((1, 7)) == nodes.parts(()) == nodes.parts((4, 0)) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (0, "inside=0 is not possible; give the number of workers a node, such as inside=8"),
        (-2, "inside=-2 is not possible"),
        (True, "inside=True is not possible"),
        ("nodes", "inside='nodes' is not possible"),
        ("8:fp8", "codec 'fp8' is not known"),
    ],
)
def test_what_are_no_nodes(given: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Configuration.make("topk", {}, inside=given)


@pytest.mark.parametrize(
    ("given", "ranks", "environment", "message"),
    [
        (3, range(8), {}, "8 workers are no nodes of inside=3 each; start as many on every node, or leave inside out"),
        ("node", range(8), {}, "inside='node' reads LOCAL_WORLD_SIZE, LOCAL_RANK and RANK, .* such as inside=8"),
        ("node", range(7), torchrun(5, 4), r"rank 5 is worker 1 of 4 on its node, so ranks \[0, .*are no nodes"),
        ("node", range(8), torchrun(4, 3) | {"LOCAL_RANK": "0"}, "rank 4 is worker 0 of 3 on its node"),
    ],
)
def test_a_world_that_is_no_grid_is_refused(
    given: int | str, ranks: range, environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Inside.parse(given).of(ranks, environment)


@pytest.mark.parametrize("codec", ["nearest:8", "nearest:4", "smoothed:8", "dynamic"])
def test_a_codec_writes_what_stays_within_nodes(codec: str) -> None:
    """The same bits on all ranks, off by what the codec loses twice, in about its share of the bytes."""
    case, bits = Case("dense"), 4 if codec.endswith("4") else 8
    plain, coded = (
        LocalWorld(configured(case, dense=EVERYTHING, inside=inside), SLOTS, 4) for inside in ("2", f"2:{codec}")
    )
    for step in range(2):
        gradients = gradients_of(4, step)
        mean = torch.stack(gradients).double().mean(0)
        average = averaged(coded, gradients).double()
        averaged(plain, gradients_of(4, step))
        assert (average - mean).square().sum() <= {4: 0.1, 8: 0.002}[bits] * mean.square().sum()
    sent = [world.engines[0].meter.node.wire_bytes for world in (plain, coded)]
    assert bits / 32 <= sent[1] / sent[0] <= 1.1 * bits / 32


def test_what_is_drawn_within_nodes_is_right_on_average() -> None:
    """The error of the mean of 100 steps along the mean is within 5 standard errors, pooled over all values."""
    case, steps = Case("dense"), []
    world = LocalWorld(configured(case, dense=EVERYTHING, inside="2:qsgd:2"), SLOTS, 4)
    mean = torch.stack(gradients_of(4, 0)).double().mean(0)
    for _ in range(100):
        steps.append(averaged(world, gradients_of(4, 0)).double())
    draws = torch.stack(steps)
    error, variance = draws.mean(0) - mean, draws.var(0) / len(draws)
    assert variance.sum() > 0
    assert (error * mean).sum().abs() <= 5 * (variance * mean.square()).sum().sqrt()


def test_codecs_within_nodes_are_read_and_refused() -> None:
    for given in ("8:nearest:4", "node:smoothed:8", "4:bf16", "2"):
        assert str(Inside.parse(given)) == given
    with pytest.raises(ConfigurationError, match="the size of what 3lc writes depends on data"):
        Inside.parse("8:3lc")
    with pytest.raises(ConfigurationError, match="fp8"):
        Inside.parse("8:fp8")
