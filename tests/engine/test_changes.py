"""Options and methods that change while training goes on: what is owed stays owed, and every rank changes alike."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire
from catalogue import OPTIONS, Case, cases
from gradwire.engine.choices import Choices
from gradwire.engine.configuration import Configuration
from gradwire.engine.guards.rollback import Rollback
from gradwire.engine.mixture import configure
from gradwire.engine.schedule import stages
from gradwire.errors import ConfigurationError
from gradwire.layout import flat_slots
from gradwire.local.world import LocalWorld
from gradwire.memory import OWED
from models import SHAPES, batch, network
from pool import Pool, ranks
from trained import Run

SLOTS = flat_slots(list(SHAPES.items()))
WORKERS = 2
USUAL = list(
    {
        case.method: case for case in reversed(cases()) if case.memory == gradwire.methods.get(case.method).memory
    }.values()
)
ROUNDING = {"fp16": 2**-10, "bf16": 2**-7}
SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("topk", {"ratio": {0: 0.25, 2: 0.01}}),
    ("dgc", {"ratio": {0: 0.25, 1: 0.0625, 2: 0.001}, "indices": "entropy"}),
    ("powersgd", {"rank": {0: 2, 2: 4, 3: 1}}),
    ("acpsgd", {"rank": {0: 4, 1: 30, 3: 2}}),
    ("qsgd", {"bits": {0: 8, 2: 4}}),
    ("ef21", {"ratio": {0: 0.5, 2: 0.1}}),
]
Gradients = list[Tensor]


def configured(case: Case) -> Configuration:
    return Configuration.make(case.method, case.options, *case.choices)


def gradients(step: int) -> Gradients:
    return [
        torch.randn(SLOTS[-1].stop, generator=torch.Generator().manual_seed(10 * step + rank))
        for rank in range(WORKERS)
    ]


def averaged(world: LocalWorld, step: int) -> Tensor:
    """What every rank has, which is the same bits."""
    buffers = gradients(step)
    world.average(buffers)
    assert all(torch.equal(buffers[0], other) for other in buffers)
    assert buffers[0].isfinite().all()
    return buffers[0]


def change(world: LocalWorld, configuration: Configuration) -> None:
    for engine in world.engines:
        engine.change(configuration)


def reloaded(world: LocalWorld, configuration: Configuration) -> LocalWorld:
    """Another world, attached by the same choices, that goes on from the state of one."""
    other = LocalWorld(configuration, SLOTS, WORKERS)
    for engine, saved in zip(other.engines, world.engines, strict=True):
        engine.go_on(saved.step, saved.dense_steps, paused=saved.paused)
        engine.store.load(saved.store.state(), saved.store.kinds())
    return other


def test_what_is_owed_comes_whatever_takes_the_methods_place() -> None:
    """A dense average at last brings all that compression left out before, also what owners kept back."""
    for case in cases("residual"):
        for following in (Case("topk", {"ratio": 0.1}, "layer", "gather", "residual"), None):
            world = LocalWorld(configured(case), SLOTS, WORKERS)
            put_in, came_out, steps = torch.zeros(()), torch.zeros(()), 4
            for step in range(steps):
                if step == 2 and following is not None:
                    change(world, configured(following))
                if step == steps - 1:
                    change(world, configured(Case("dense")))
                put_in = put_in + torch.stack(gradients(step)).double().mean(0)
                came_out = came_out + averaged(world, step).double()
            scale = 1 + float(put_in.abs().max())
            off = float((came_out - put_in).abs().max())
            assert off < 2 * ROUNDING.get(case.method, 1e-5) * scale, (str(case), off)


@pytest.mark.parametrize("case", USUAL, ids=str)
def test_a_memory_of_the_same_kind_goes_on(case: Case) -> None:
    """Other options and back again, with no step in between, change no bit of the memory nor of the averages."""
    for others in OPTIONS.get(case.method, [])[1:]:
        fewer_rows = {"rank", "rank_fraction", "slice", "chunk"} & others.keys() or case.method in ("alq", "amq")
        world, apart = LocalWorld(configured(case), SLOTS, WORKERS), LocalWorld(configured(case), SLOTS, WORKERS)
        for step in range(2):
            assert torch.equal(averaged(world, step), averaged(apart, step))
        change(apart, Configuration.make(case.method, others, *case.choices))
        change(apart, configured(case))
        for engine, changed in zip(world.engines, apart.engines, strict=True):
            for field, tensors in engine.store.state().items():
                if field.startswith(("residual", "owner")) or not fewer_rows:
                    for name, kept in tensors.items():
                        found = changed.store.get(field, name)
                        assert found is not None, (field, name)
                        assert torch.equal(found, kept), (field, name)
        assert fewer_rows or torch.equal(averaged(world, 2), averaged(apart, 2))


def test_one_method_after_the_other_through_the_catalogue() -> None:
    """Ranks keep the same bits, nothing is left of former methods, and a run that goes on gives the same bits."""
    world = LocalWorld(configured(USUAL[0]), SLOTS, WORKERS)
    for number, case in enumerate([*USUAL, *reversed(USUAL)]):
        change(world, configured(case))
        again = reloaded(world, configured(case))
        for step in (2 * number, 2 * number + 1):
            assert torch.equal(averaged(world, step), averaged(again, step)), str(case)
        fresh = LocalWorld(configured(case), SLOTS, WORKERS)
        averaged(fresh, 0)
        kept, expected = (set(each.engines[0].store.state()) for each in (world, fresh))
        assert kept - {OWED, "squares"} <= expected | {"regions"}, (str(case), kept - expected)


@pytest.mark.parametrize(("method", "options"), SCHEDULES)
def test_a_schedule_is_a_change_at_its_steps(method: str, options: dict[str, Any]) -> None:
    """The same bits, also after a restart in any step, and after dense steps, which it does not count."""
    scheduled = Configuration.make(method, options)
    by_step = dict(stages(options))
    world = LocalWorld(Configuration.make(method, by_step[0]), SLOTS, WORKERS)
    other = LocalWorld(scheduled, SLOTS, WORKERS)
    late = LocalWorld(Configuration.make(method, options, start=2), SLOTS, WORKERS)
    for step in (7, 8):
        averaged(late, step)
    for step in range(5):
        if step in by_step and step:
            change(world, Configuration.make(method, by_step[step]))
        expected = averaged(world, step)
        assert torch.equal(averaged(other, step), expected)
        assert torch.equal(averaged(late, step), expected)
        other = reloaded(other, scheduled)
    assert world.engines[0].store.state().keys() == other.engines[0].store.state().keys()


def test_a_step_that_is_taken_back_does_not_put_a_schedule_on() -> None:
    scheduled = Configuration.make("powersgd", {"rank": {0: 2, 2: 4}})
    worlds = [LocalWorld(scheduled, SLOTS, WORKERS) for _ in range(2)]
    for engine in worlds[1].engines:
        engine.guards.append(Rollback(engine, {slot.name: torch.float32 for slot in SLOTS}))
    for step in range(4):
        expected = averaged(worlds[0], step)
        worlds[1].average([torch.full_like(each, torch.nan) for each in gradients(step)])
        assert torch.equal(averaged(worlds[1], step), expected)


def test_what_is_owed_is_taken_back_with_the_step_that_took_it() -> None:
    world, other = (LocalWorld(Configuration.make("topk", {"ratio": 0.1}), SLOTS, WORKERS) for _ in range(2))
    for engine in world.engines:
        engine.guards.append(Rollback(engine, {slot.name: torch.float32 for slot in SLOTS}))
    for each in (world, other):
        averaged(each, 0)
        change(each, Configuration.make("qsgd", {}))
    world.average([torch.full_like(each, torch.nan) for each in gradients(1)])
    assert torch.equal(averaged(world, 1), averaged(other, 1))


def test_factors_keep_their_rows() -> None:
    world = LocalWorld(Configuration.make("powersgd", {"rank": 4}), SLOTS, WORKERS)
    averaged(world, 0)
    before = {name: kept.clone() for name, kept in world.engines[0].store.state()["q"].items()}
    for rank in (2, 6):
        change(world, Configuration.make("powersgd", {"rank": rank}))
        after = world.engines[0].store.state()["q"]
        for name in before.keys() & after.keys():
            rows = min(2, len(before[name]), len(after[name]))
            assert torch.equal(after[name][:rows], before[name][:rows])
            assert rank < 6 or (len(after[name]) == min(6, *_matrix(SHAPES[name])) and after[name].any(1).all())


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    return shape[0], torch.Size(shape[1:]).numel()


def test_estimates_still_add_up() -> None:
    """EF21's shared estimate stays the mean of the workers' own, whatever compresses the differences."""
    world = LocalWorld(Configuration.make("topk", {"ratio": 0.1}, memory="ef21"), SLOTS, WORKERS)
    for step, (method, options) in enumerate([("topk", {"ratio": 0.3}), ("powersgd", {"rank": 2}), ("topk", {})]):
        averaged(world, step)
        if method == "topk":
            change(world, Configuration.make(method, options, memory="ef21"))
    states = [engine.store.state() for engine in world.engines]
    for name, estimate in states[0]["residual.estimate"].items():
        lag = torch.stack([state["residual"][name] for state in states]).mean(0)
        assert torch.allclose(-lag, estimate, atol=1e-5)


@pytest.mark.parametrize(
    "ratio", [{}, {1: 0.1}, {0: 0.1, -1: 0.2}, {0: 0.1, 2.5: 0.2}, {0: 0.1, True: 0.2}, {"0": 0.1}]
)
def test_a_schedule_has_values_from_step_0(ratio: dict[Any, float]) -> None:
    with pytest.raises(ConfigurationError, match=r"ratio=.* is no schedule; write values by the step"):
        Configuration.make("topk", {"ratio": ratio})


@pytest.mark.parametrize(("method", "options"), SCHEDULES)
def test_a_roundtrip_goes_by_the_schedule(method: str, options: dict[str, Any]) -> None:
    matrix = torch.randn(64, 64, generator=torch.Generator().manual_seed(5))
    for step in range(5):
        scheduled = gradwire.roundtrip(matrix, method, step=step, **options)
        _, then = [each for each in stages(options) if each[0] <= step][-1]
        alone = gradwire.roundtrip(matrix, method, step=step, **then)
        assert scheduled.wire_bytes == alone.wire_bytes
        assert torch.equal(scheduled.decoded, alone.decoded)


def test_every_value_of_a_schedule_must_be_possible() -> None:
    with pytest.raises(ConfigurationError, match="ratio=2"):
        Configuration.make("topk", {"ratio": {0: 0.1, 5: 2}})
    assert Configuration.make("topk", {"ratio": {0: 0.1, 5: 0.1}}).describe()["ratio"] == "0.1"


class OwnLoop(Run):
    def __init__(self, method: Any, **choices: Any) -> None:
        self.net = network()
        self.handle = gradwire.Synchronizer(self.net, method, **choices)

    def step(self, number: int) -> Tensor:
        inputs, labels = batch(dist.get_rank(), number)
        self.net.zero_grad()
        nn.functional.cross_entropy(self.net.eval()(inputs), labels).backward()
        self.handle.synchronize()
        return torch.cat([each.grad.view(-1) for each in self.net.parameters() if each.grad is not None])


@pytest.mark.parametrize("kind", [Run, OwnLoop])
@ranks(2)
def test_a_handle_changes(kind: Callable[..., Run]) -> None:
    dense = gradwire.DensePolicy(below=200)
    scheduled, run = kind("topk", ratio={0: 0.25, 3: 0.05}, dense=dense), kind("topk", ratio=0.25, dense=dense)
    for number in range(3):
        assert torch.equal(run.step(number), scheduled.step(number))
    run.handle.change(ratio=0.05)
    state = run.handle.state_dict()
    for number in (3, 4):
        assert torch.equal(run.step(number), scheduled.step(number))
    run.handle.change("acpsgd", rank=2)
    run.handle.change({"0.*": "qsgd:bits=4", "*": "acpsgd:rank=2"})
    found = [run.step(number) for number in (5, 6)]
    run.handle.close()
    run = kind("topk", ratio=0.25, dense=dense)
    with pytest.raises(ConfigurationError, match=r"saved with ratio='0.05', this handle has ratio='0.25'; attach with"):
        run.handle.load_state_dict(state)
    run.handle.change(ratio=0.05)
    run.handle.load_state_dict(state)
    scheduled.handle.load_state_dict({**scheduled.handle.state_dict(), "tensors": state["tensors"], "step": 3})
    for number in (3, 4):
        assert torch.equal(run.step(number), scheduled.step(number))
    run.handle.change({"0.*": "qsgd:bits=4", "*": "acpsgd:rank=2"})
    assert all(map(torch.equal, [run.step(number) for number in (5, 6)], found))
    with pytest.raises(ConfigurationError, match=r"a method for each of the patterns '0\.\*', '\*'; give all of them"):
        run.handle.change(bits=8)
    for each in (run, scheduled):
        each.handle.close()


@ranks(2)
def test_a_state_is_whole_that_is_saved_after_a_change_before_the_next_step() -> None:
    """DDP brings buckets, and has them laid out, in the first step after a restart only."""
    run, again, last = Run("topk", ratio=0.05), Run("topk", ratio=0.05), Run("acpsgd", rank=2)
    for number in range(3):
        run.step(number)
    again.handle.load_state_dict(run.handle.state_dict())
    for each in (run, again):
        each.handle.change("acpsgd", rank=2)
    last.handle.load_state_dict(again.handle.state_dict())
    for number in range(3, 6):
        average = run.step(number)
        assert all(torch.equal(each.step(number), average) for each in (again, last)), number
    for each in (run, again, last):
        each.handle.close()


@ranks(2)
def test_ranks_change_together_or_not_at_all() -> None:
    """Whoever changes alone or otherwise is told so, and nothing is changed."""
    rank, group = dist.get_rank(), dist.new_group(timeout=timedelta(seconds=1))
    run = OwnLoop("topk", ratio=0.1, process_group=group)
    if rank == 0:
        with pytest.raises(ConfigurationError, match=r"rank 1 of 2 did not come to change within"):
            run.handle.change(ratio=0.2)
    dist.barrier()
    run.handle.close()
    run = OwnLoop("topk", ratio=0.1)
    before = run.handle.configuration
    with pytest.raises(ConfigurationError, match=r"ratio=0.2.*ratio=0.3.*change to the same on all ranks"):
        run.handle.change(ratio=0.2 + rank / 10)
    for arguments, sentence in (
        ({"rank": 3}, "'topk' has no option 'rank'"),
        ({"ratio": 3}, "ratio=3"),
        ({"inside": 2}, "inside=2 cannot change while training goes on; close this handle and attach anew with it"),
        ({"granularity": "model"}, "granularity='model' collects whole gradients"),
        ({"memory": "ef21"}, "was attached without; attach with rollback=True"),
        ({"method": {"9.*": "topk", "*": "dense"}}, r"no parameter matches the pattern '9\.\*'"),
    ):
        with pytest.raises(ConfigurationError, match=sentence):
            run.handle.change(**arguments)
    if rank == 1:
        run.handle.engine.step = 1
    with pytest.raises(ConfigurationError, match=r"change after step 0.*change after step 1"):
        run.handle.change(ratio=0.2)
    run.handle.engine.step = 0
    assert run.handle.configuration is before
    assert run.handle.engine.configuration is before
    run.handle.close()
    with pytest.raises(gradwire.GradwireError, match="was closed, and there is nothing to change"):
        run.handle.change(ratio=0.2)


def forgetting() -> list[str]:
    """What rank 0 says when a memory cannot go on."""
    said: list[str] = []
    heard = logging.Handler()
    heard.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradwire").addHandler(heard)
    run = OwnLoop("topk", ratio=0.1, rollback=True)
    for arguments in ({"memory": "ef21"}, {"ratio": 0.2}, {"memory": "residual"}, {"memory": "none"}):
        run.step(0)
        run.handle.change(**arguments)
    run.handle.close()
    logging.getLogger("gradwire").removeHandler(heard)
    return [each for each in said if "memory" in each]


def test_what_is_forgotten_is_said(pool: Pool) -> None:
    said, nothing = pool.run(2, forgetting)
    assert said == ["what memory=ef21 kept is forgotten, and memory=residual begins with nothing"]
    assert not nothing


def test_a_mixture_has_one_stage() -> None:
    mixture = configure({"0.*": "topk:ratio=0.1", "*": "dense"}, {}, Choices())
    assert mixture.at(3) is mixture
    assert mixture.stages == (mixture,)
