"""Two-level averages: what a node's workers share is a smaller model, averaged between nodes as any model would be."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from catalogue import Case, cases
from gradwire.engine import DensePolicy
from gradwire.engine.configuration import Configuration
from gradwire.engine.nodes import Inside, Nodes
from gradwire.errors import ConfigurationError
from gradwire.layout import aligned, flat_slots
from gradwire.local.world import LocalWorld
from gradwire.routes import Shares
from models import SHAPES, batch, flat, gradient, network, parameters
from pool import Pool
from sharded import replicated, train

SLOTS = flat_slots(list(SHAPES.items())[::-1])
PLACES = {slot.name: slice(slot.offset, slot.stop) for slot in SLOTS}
FIRSTS = list({(case.method, case.route): case for case in reversed(cases())}.values())
"""Each method's first attachment on each of its routes."""

EVERYTHING = DensePolicy(below=0, vectors=False)
HALF = gradwire.memory.Residual(dtype="bfloat16")
ROUNDING = {"fp16": 2**-10, "bf16": 2**-7}


def configured(case: Case, **more: Any) -> Configuration:
    return Configuration.make(case.method, case.options, *case.choices, **more)


def gradients_of(workers: int, step: int) -> list[Tensor]:
    return [torch.cat([gradient(name, rank, step).flatten() for name in PLACES]) for rank in range(workers)]


def node_means(gradients: list[Tensor], size: int) -> list[Tensor]:
    return [torch.stack(gradients[first : first + size]).mean(0) for first in range(0, len(gradients), size)]


def rows(values: Tensor, name: str, nodes: Nodes, place: int) -> Tensor:
    first, stop = nodes.rows(SHAPES[name][0], place)
    return values[PLACES[name]].view(SHAPES[name])[first:stop].flatten()


def averaged(world: LocalWorld, gradients: list[Tensor]) -> Tensor:
    """What every rank has, which is the same bits."""
    world.average(gradients)
    first, *others = [each.view(torch.int32) for each in gradients]
    assert all(torch.equal(first, other) for other in others), str(world.engines[0].configuration)
    return gradients[0]


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
        ("8:fp8", "inside='8:fp8' is not possible; .* inside='8:bf16', or inside='node' under torchrun"),
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


def on_a_network(chosen: list[Case]) -> list[list[Tensor]]:
    """Averages of three steps of each attachment on two nodes of two."""
    found = []
    for case in chosen:
        named = parameters()
        given = named[::-1] if case.granularity == "model" else named
        sync = gradwire.Synchronizer(given, case.method, inside=2, **case.arguments)
        found.append([])
        for step in range(3):
            for name, parameter in named:
                parameter.grad = gradient(name, dist.get_rank(), step)
            sync.synchronize()
            found[-1].append(torch.cat([each.grad.flatten() for _, each in named[::-1] if each.grad is not None]))
        sync.close()
    return found


def test_a_network_gives_the_bits_of_a_world_in_one_process(pool: Pool) -> None:
    """But for what gloo adds up over all four, whose sums have several orders: that is as close as float32 is."""
    chosen = [case for case in FIRSTS if case.method not in ("dense", "fp16", "bf16")]
    results = pool.run(4, on_a_network, chosen)
    for number, case in enumerate(chosen):
        world = LocalWorld(configured(case, inside=2), SLOTS, 4)
        shared = [
            slot.name
            for share in world.engines[0].shares(world._units[0])
            if share.within
            for slot in share.within.slots
        ]
        for step in range(3):
            ours = averaged(world, gradients_of(4, step))
            for rank in range(4):
                theirs = results[rank][number][step]
                assert torch.equal(theirs, results[0][number][step]), (str(case), rank)
                assert torch.allclose(theirs, ours, rtol=1e-5, atol=1e-6), str(case)
                for name in shared:
                    assert torch.equal(theirs[PLACES[name]], ours[PLACES[name]]), (str(case), name)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    inputs, labels = batch(dist.get_rank(), step)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()


def trained(method: str, steps: int, choices: dict[str, Any]) -> tuple[Tensor, dict[str, Any], str, gradwire.Stats]:
    """A DDP model after some steps, and what its handle says; two processes are a node."""
    os.environ.update(torchrun(dist.get_rank()))
    model = DistributedDataParallel(network())
    handle = gradwire.compress(model, method, inside="node", **choices)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        take_step(model, optimizer, step)
    found = flat(model), handle.state_dict(), repr(handle), handle.stats()
    handle.close()
    return found


@pytest.mark.parametrize(
    ("method", "choices"),
    [
        ("efsignsgd", {"verify_every": 2}),
        ("powersgd", {"start": 2, "rollback": True}),
        ("topk", {"audit_every": 2, "route": "sharded", "ratio": 0.1}),
    ],
)
def test_ddp_trains_in_two_levels(pool: Pool, method: str, choices: dict[str, Any]) -> None:
    results = pool.run(4, trained, method, 6, choices)
    first = results[0]
    assert all(torch.equal(model, first[0]) for model, *_ in results)
    assert "inside=2" in first[2]
    assert "4 workers on 2 nodes of 2, which average in float32 inside" in first[2]
    assert first[3].node_bytes > 0
    assert f"{first[3].as_dict()['node_bytes']:.0f}" == str(first[3].node_bytes)
    residuals = [state["tensors"]["residual"]["0.weight"].shape for _, state, _, _ in results]
    assert residuals == [(48, 48)] * 4
    with pytest.raises(ConfigurationError, match=r"share what they remember inside nodes \(inside=2\), 4 in all"):
        gradwire.redistribute([state for _, state, _, _ in results], workers=2)


def resumed(method: str, choices: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The same steps in one run, and in two of which the second loads what the first saved."""
    ends = []
    for parts in ((6,), (3, 3)):
        states: tuple[Any, Any] | None = None
        done = 0
        for steps in parts:
            model = DistributedDataParallel(network())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            handle = gradwire.compress(model, method, inside=2, **choices)
            if states is not None:
                model.load_state_dict(states[0])
                handle.load_state_dict(states[1])
            for step in range(done, done + steps):
                take_step(model, optimizer, step)
            done += steps
            states = {name: each.clone() for name, each in model.state_dict().items()}, handle.state_dict()
            handle.close()
        ends.append(flat(model))
    return ends[0], ends[1]


@pytest.mark.parametrize(
    ("method", "choices"), [("qsgd", {"memory": "diana"}), ("acpsgd", {"rank": 2}), ("efsignsgd", {"memory": HALF})]
)
def test_a_restart_gives_the_same_bits(pool: Pool, method: str, choices: dict[str, Any]) -> None:
    for once, twice in pool.run(4, resumed, method, choices):
        assert torch.equal(once, twice)


def refused(inside_of: Callable[[int], Any], model: str = "topk") -> str:
    with pytest.raises(ConfigurationError) as caught:
        gradwire.Synchronizer(parameters(), model, inside=inside_of(dist.get_rank()))
    sync = gradwire.Synchronizer(parameters(), model, inside=2)  # nobody is left waiting
    sync.close()
    return str(caught.value)


def of_three(rank: int) -> int:
    return 3


def two_or_four(rank: int) -> int:
    return 2 if rank < 3 else 4


@pytest.mark.parametrize(
    ("inside_of", "message"),
    [
        (of_three, "4 workers are no nodes of inside=3 each"),
        (two_or_four, "rank 0 has 'inside=2', rank 3 has 'inside=4'"),
    ],
)
def test_ranks_agree_on_their_nodes(pool: Pool, inside_of: Callable[[int], Any], message: str) -> None:
    for said in pool.run(4, refused, inside_of):
        assert message in said


def local_steps() -> tuple[Tensor, int, int]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = gradwire.periodic(optimizer, every=2, method="topk", ratio=0.1, route="sharded", fragments=2, inside=2)
    for step in range(8):
        take_step(model, optimizer, step)
    handle.synchronize()
    stats = handle.stats()
    handle.close()
    return flat(model), stats.wire_bytes, stats.node_bytes


def signs_of_momenta() -> tuple[Tensor, int, int]:
    model = network()
    optimizer = gradwire.optim.OneBitAdam(model.named_parameters(), freeze_step=3, lr=1e-2, inside=2)
    for step in range(8):
        take_step(model, optimizer, step)
    stats = optimizer.stats()
    optimizer.close()
    return flat(model), stats.wire_bytes, stats.node_bytes


def replicas_of_fsdp2() -> tuple[Tensor, int, int]:
    model = replicated()
    handle = gradwire.compress(model, "efsignsgd", inside=2)
    trained = torch.cat([each.flatten() for each in train(model, range(3))])
    stats = handle.stats()
    handle.close()
    return trained, stats.wire_bytes, stats.node_bytes


@pytest.mark.parametrize("training", [local_steps, signs_of_momenta, replicas_of_fsdp2])
def test_other_averages_have_two_levels_too(pool: Pool, training: Callable[[], tuple[Tensor, int, int]]) -> None:
    results = pool.run(4, training)
    assert all(torch.equal(model, results[0][0]) for model, _, _ in results)
    assert all(near > between > 0 for _, between, near in results)
