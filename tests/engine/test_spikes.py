"""A spike is scaled down before it is compressed, so that memories have nothing of it to hand out for many steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire import ConfigurationError
from gradwire.engine.configuration import Configuration
from gradwire.engine.guards.spikes import FIRST_STEPS, SEEN, USUAL, Spikes
from gradwire.layout import flat_slots
from gradwire.local import LocalWorld
from pool import ranks

SHAPES = {"matrix": (60, 50), "vector": (70,)}
TIMES = 4.0
SPIKE = 20
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("topk", {"ratio": 0.01}),
    ("efsignsgd", {"route": "gather"}),
    ("powersgd", {"rank": 2}),
    ("deadzone", {"bits": 0.3, "granularity": "layer"}),
]


def gradients(step: int) -> dict[str, torch.Tensor]:
    """This rank's, of which some goes on from step to step."""
    lasting, own = (torch.Generator().manual_seed(seed) for seed in (1, 100 * dist.get_rank() + step + 2))
    return {
        name: torch.randn(shape, generator=lasting) + torch.randn(shape, generator=own)
        for name, shape in SHAPES.items()
    }


class Run:
    """Averages, step by step."""

    def __init__(self, method: str, **choices: Any) -> None:
        self.parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
        self.sync = gradwire.Synchronizer(self.parameters.items(), method, **choices)

    def step(self, given: dict[str, torch.Tensor], times: float = 1.0) -> torch.Tensor:
        for name, each in self.parameters.items():
            each.grad = times * given[name]
        self.sync.synchronize()
        return torch.cat([each.grad.flatten() for each in self.parameters.values() if each.grad is not None])

    def kept(self, field: str) -> torch.Tensor:
        tensors = self.sync.state_dict()["tensors"].get(field, {})
        return torch.cat([tensors[name].flatten() for name in SHAPES if name in tensors])


@ranks(2)
def test_memories_keep_no_more_of_a_spike_than_of_a_large_step() -> None:
    for method, options in METHODS:
        runs = [Run(method, **options, dense=gradwire.DensePolicy(0, vectors=False), **each) for each in CLIPPING]
        norms: list[list[float]] = [[] for _ in runs]
        for step in range(SPIKE + 15):
            before = [run.kept("residual").norm() for run in runs] if step else [torch.zeros(()) for _ in runs]
            most = TIMES * runs[0].kept(USUAL).norm() if step else None
            spiky = 100.0 if step == SPIKE and dist.get_rank() == 0 else 1.0
            averages = [run.step(gradients(step), spiky) for run in runs]
            for found, average in zip(norms, averages, strict=True):
                found.append(average.norm().item())
            if step < SPIKE:
                assert torch.equal(*averages), (method, step)
            if step == SPIKE and dist.get_rank() == 0 and most is not None:
                left = [run.kept("residual").norm() for run in runs]
                assert left[0] <= before[0] + 1.001 * most, method
                assert left[1] > before[1] + 5 * most, method
        usual = max(norms[0][10:SPIKE])
        assert max(norms[0][SPIKE + 1 :]) < 3 * usual < max(norms[1][SPIKE + 1 :]), (method, norms)
        for run in runs:
            run.sync.close()


CLIPPING: list[dict[str, Any]] = [{"clip_spikes": TIMES}, {}]


@ranks(2)
def test_a_run_that_goes_on_and_one_with_a_bad_step_have_the_same_bits() -> None:
    ends = []
    for stopped, bad in ((None, None), (15, None), (None, 15)):
        choices = {"ratio": 0.05, "clip_spikes": TIMES, "rollback": True}
        run = Run("topk", **choices)
        for step in range(SPIKE + 3):
            if step == stopped:
                state = run.sync.state_dict()
                states: list[dict[str, Any]] = [{}, {}]
                dist.all_gather_object(states, state)
                third = gradwire.redistribute(states, 3)[2]["tensors"][USUAL]
                assert third == states[0]["tensors"][USUAL], "with one worker more"
                run.sync.close()
                run = Run("topk", **choices)
                run.sync.load_state_dict(state)
            if step == bad:
                assert not run.step(gradients(step), torch.inf).isfinite().all()
            average = run.step(gradients(step), 100.0 if step == SPIKE else 1.0)
        ends.append(torch.cat([average, *map(run.kept, ("residual", USUAL, SEEN))]))
        run.sync.close()
    assert all(torch.equal(ends[0], each) for each in ends)


@ranks(2)
def test_what_is_usual_is_learnt_from_gradients_that_were_seen() -> None:
    """A run that goes on from a state of one that clipped nothing, or whose first gradients tell nothing."""
    plain, clipped = Run("dense"), Run("dense", clip_spikes=TIMES)
    for step in range(SPIKE):
        plain.step(gradients(step))
    clipped.sync.load_state_dict(plain.sync.state_dict())
    assert not clipped.step(gradients(0), torch.inf).isfinite().all()
    for step in range(SPIKE):
        assert torch.equal(clipped.step(gradients(step)), plain.step(gradients(step))), step
    assert clipped.step(gradients(SPIKE), 100.0).norm() < 10 * plain.step(gradients(SPIKE)).norm()
    clipped.sync.close()
    plain.sync.close()


@ranks(2)
def test_what_lasts_is_no_spike() -> None:
    """Gradients that stay 100 times larger, and those that come after none, are averaged as they are in the end."""
    for scales in ([1.0] * SPIKE + [100.0] * 20, [0.0] * SPIKE + [1.0] * 20):
        clipped, plain = Run("dense", clip_spikes=TIMES), Run("dense")
        same = [torch.equal(*(run.step(gradients(0), times) for run in (clipped, plain))) for times in scales]
        assert all(same[:SPIKE])
        assert not same[SPIKE + 1]
        assert all(same[-5:])
        clipped.sync.close()
        plain.sync.close()


@ranks(2)
def test_steps_without_inputs_tell_nothing() -> None:
    """As with ``model.join()``, and where an own loop has no gradients: those that come after them are no spikes."""
    clipped, plain = Run("dense", clip_spikes=TIMES), Run("dense")
    for step in range(2 * SPIKE):
        here = 0.0 if dist.get_rank() and FIRST_STEPS < step < SPIKE + FIRST_STEPS else 1.0
        assert torch.equal(*(run.step(gradients(step), here) for run in (clipped, plain))), step
    clipped.sync.close()
    plain.sync.close()


def test_nothing_waits_for_a_device() -> None:
    """On the meta device, where nothing can be read."""
    slots = flat_slots(list(SHAPES.items()))
    world = LocalWorld(Configuration.make("topk", {"ratio": 0.01}), slots, 2, torch.device("meta"))
    for engine in world.engines:
        engine.guards.append(Spikes(TIMES, list(SHAPES), engine))
    for _ in range(FIRST_STEPS + 3):
        world.average([torch.zeros(slots[-1].stop, device="meta") for _ in world.engines])
    assert world.engines[0].store.get(USUAL, "matrix") is not None


@ranks(1)
def test_times_are_checked() -> None:
    named = [("weight", torch.nn.Parameter(torch.zeros(40, 50)))]
    for times in (1, 0.5, -4.0, float("inf"), float("nan"), True, "4"):
        with pytest.raises(ConfigurationError, match=r"clip_spikes=.* is out of range; choose how many times"):
            gradwire.Synchronizer(named, "topk", clip_spikes=times)
