"""Steps that are averaged densely, at first and while a method is paused: it is as if they had not been."""

from __future__ import annotations

import copy
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import gradwire
from catalogue import Case, cases
from gradwire.codecs.select.variance import SQUARES
from gradwire.engine.configuration import Configuration
from gradwire.engine.guards.rollback import Rollback
from gradwire.errors import ConfigurationError
from gradwire.layout import flat_slots
from gradwire.local.world import LocalWorld
from models import network
from pool import ranks
from trained import Run

WORKERS = 2
SLOTS = flat_slots([("vector", (40,)), ("weight", (40, 50)), ("filter", (30, 4, 3, 3)), ("bias", (17,))])
USUAL = {case.method: case for case in reversed(cases()) if case.memory != "none"} | {
    case.method: case for case in reversed(cases()) if case.memory == gradwire.methods.get(case.method).memory
}
"""Every method as it usually is."""

Step = list[Tensor]


def world(case: Case, start: int = 0) -> LocalWorld:
    return LocalWorld(Configuration.make(case.method, case.options, *case.choices, start=start), SLOTS, WORKERS)


def gradients(count: int) -> list[Step]:
    noise = torch.Generator().manual_seed(3)
    return [[torch.randn(SLOTS[-1].stop, generator=noise) for _ in range(WORKERS)] for _ in range(count)]


def averages(together: LocalWorld, inputs: list[Step]) -> list[Tensor]:
    found = []
    for step in inputs:
        buffers = [gradient.clone() for gradient in step]
        together.average(buffers)
        assert all(torch.equal(buffers[0].nan_to_num(), other.nan_to_num()) for other in buffers)
        found.append(buffers[0])
    return found


def reloaded(together: LocalWorld, case: Case, start: int) -> LocalWorld:
    """Another world that goes on from the state of one."""
    other = world(case, start)
    for engine, saved in zip(other.engines, together.engines, strict=True):
        engine.store.load(saved.store.state(), saved.store.kinds())
        engine.go_on(saved.step, saved.dense_steps, paused=saved.paused)
    return other


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("case", USUAL.values(), ids=str)
def test_a_method_begins_after_dense_steps_as_if_it_were_attached_then(case: Case) -> None:
    """Also when the run is broken off among the dense steps, or after them."""
    inputs = gradients(5)
    together, begins = world(case, start=2), world(case)
    dense = averages(world(Case("dense")), inputs[:2])
    assert same(averages(together, inputs[:2]), dense)
    assert [engine.dense_steps for engine in together.engines] == [2] * WORKERS
    assert same(averages(together, inputs[2:]), averages(begins, inputs[2:]))
    for cut in (1, 3):
        first = world(case, start=2)
        before = averages(first, inputs[:cut])
        after = averages(reloaded(first, case, start=2), inputs[cut:])
        assert same(before + after, dense + averages(world(case), inputs[2:]))


@pytest.mark.parametrize("case", USUAL.values(), ids=str)
def test_a_pause_leaves_nothing_behind(case: Case) -> None:
    """Its averages are dense; those after it are what they would have been without it."""
    inputs = gradients(6)
    together = world(case, start=1)
    expected = averages(world(case), [*inputs[1:2], *inputs[4:]])
    found = averages(together, inputs[:2])
    for engine in together.engines:
        engine.pause()
    found += averages(together, inputs[2:3])
    together = reloaded(together, case, start=1)
    found += averages(together, inputs[3:4])
    for engine in together.engines:
        assert engine.paused
        engine.resume()
        assert engine.dense_steps == 3
    found += averages(together, inputs[4:])
    dense = averages(world(Case("dense")), [inputs[0], *inputs[2:4]])
    assert same([found[0], *found[2:4]], dense)
    assert same([found[1], *found[4:]], expected)


@pytest.mark.parametrize("case", USUAL.values(), ids=str)
def test_other_choices_begin_as_if_they_were_attached_then(case: Case) -> None:
    """Whatever was remembered before, and also if the run is broken off later."""
    inputs = gradients(5)
    together = world(USUAL["dgc"])
    averages(together, inputs[:2])
    for engine in together.engines:
        engine.adopt(world(case).engines[0].configuration)
        assert engine.dense_steps == 2
    found = averages(together, inputs[2:4])
    found += averages(reloaded(together, case, start=0), inputs[4:])
    assert same(found, averages(world(case), inputs[2:]))


def test_a_pause_among_the_first_steps_does_not_put_off_the_end_of_them() -> None:
    together = world(USUAL["topk"], start=3)
    inputs = gradients(6)
    averages(together, inputs[:1])
    for engine in together.engines:
        engine.pause()
        engine.pause()
    averages(together, inputs[1:2])
    for engine in together.engines:
        engine.resume()
        engine.resume()
        assert engine.averages_densely
    averages(together, inputs[2:3])
    assert [engine.dense_steps for engine in together.engines] == [3] * WORKERS
    assert same(averages(together, inputs[3:]), averages(world(USUAL["topk"]), inputs[3:]))


def test_dense_steps_are_counted_as_what_they_are() -> None:
    dense, case = world(Case("dense")), USUAL["topk"]
    together = world(case, start=1)
    sent = [together.average(copy.deepcopy(step)).sent_bytes for step in gradients(2)]
    assert sent[0] == dense.average(gradients(1)[0]).sent_bytes
    assert sent[1] < sent[0] / 2
    assert together.engines[0].meter.steps == 2


def test_a_dense_step_that_is_taken_back_is_none() -> None:
    case, inputs = USUAL["topk"], gradients(4)
    together = world(case, start=2)
    for engine in together.engines:
        engine.guards.append(Rollback(engine, {slot.name: torch.float32 for slot in SLOTS}))
    bad = [torch.full_like(each, torch.nan) for each in inputs[0]]
    found = averages(together, [inputs[0], bad, inputs[1], inputs[2], bad, inputs[3]])
    assert same([found[0], found[2]], averages(world(Case("dense")), inputs[:2]))
    assert same([found[3], found[5]], averages(world(case), inputs[2:]))
    for number in (1, 4):
        assert found[number].isnan().any()


def test_where_there_is_nothing_a_dense_step_sends_nothing() -> None:
    together = LocalWorld(Configuration.make("topk", {}, start=1), flat_slots([("none", (0, 5))]), WORKERS)
    assert together.average([torch.empty(0) for _ in range(WORKERS)]).sent_bytes == 0


def test_what_was_observed_in_dense_steps_is_forgotten() -> None:
    """Squares of samples are added up until a step reads them, and a dense step reads none."""
    case = Case("variance", {"moments": "samples"}, "layer", "gather", "residual")
    together, begins, inputs = world(case, start=1), world(case), gradients(2)
    squares = [engine.store.get(SQUARES, "weight") for engine in together.engines]
    for each in squares:
        assert each is not None
        each.fill_(3)
    averages(together, inputs[:1])
    assert same(averages(together, inputs[1:]), averages(begins, inputs[1:]))


@pytest.mark.parametrize("start", [-1, 2.5, True, "3"])
def test_start_is_a_number_of_steps(start: object) -> None:
    with pytest.raises(ConfigurationError, match=r"start=.* is out of range; choose a whole number of steps"):
        Configuration.make("topk", {}, start=start)


@ranks(2)
def test_a_handle_is_paused_and_goes_on() -> None:
    """Steps 0 and 1 are dense for they are the first, 4 for a pause that a restart falls into."""
    dense, plain, run = Run("dense"), Run("topk", ratio=0.1), Run("topk", ratio=0.1, start=2)
    exact = [dense.step(number) for number in range(7)]
    plain.step(2)  # as the others do, it forms its buckets after its first step
    plain.handle.load_state_dict({**plain.handle.state_dict(), "step": 0, "tensors": {}})
    expected = {number: plain.step(number) for number in (2, 3, 5, 6)}
    found = [run.step(number) for number in range(4)]
    run.handle.pause()
    state = run.handle.state_dict()
    run.handle.close()
    run = Run("topk", ratio=0.1, start=2)
    run.handle.load_state_dict(state)
    assert run.handle.paused
    found.append(run.step(4))
    run.handle.resume()
    assert not run.handle.paused
    found += [run.step(number) for number in (5, 6)]
    for number, average in enumerate(found):
        assert torch.equal(average, expected.get(number, exact[number])), number
    assert run.handle.state_dict()["dense_steps"] == 3
    for each in (dense, plain, run):
        each.handle.close()
    with pytest.raises(gradwire.GradwireError, match="was closed, and there is nothing to pause"):
        run.handle.pause()


@ranks(2)
def test_ranks_pause_together_or_not_at_all() -> None:
    """Whoever pauses alone is told so, and nothing is changed."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    net = network()
    handle = gradwire.Synchronizer(net, "topk", process_group=group)
    if dist.get_rank() == 0:
        with pytest.raises(ConfigurationError, match=r"rank 1 of 2 did not come to pause within .* timeout of 1 s"):
            handle.pause()
    dist.barrier()
    handle.close()
    handle = gradwire.Synchronizer(net, "topk")
    handle.engine.step = dist.get_rank()
    with pytest.raises(ConfigurationError, match="'pause after step 0', rank 1 has 'pause after step 1'; pause on all"):
        handle.pause()
    assert not handle.paused
    handle.engine.step = 0
    handle.pause()
    handle.synchronize()
    assert handle.engine.dense_steps == 1
    handle.close()
