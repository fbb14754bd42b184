"""What is done where the host knows no value gives the bits of what is done where it knows all of them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from gradwire import deferred, methods
from gradwire.engine.configuration import Configuration
from gradwire.engine.guards.rollback import Rollback
from gradwire.errors import PayloadError
from gradwire.layout import flat_slots
from gradwire.local import LocalWorld
from gradwire.policy import DensePolicy
from gradwire.wire import CheckedTransport, LocalTransport, Meter, Pending
from kernel_inputs import same

SLOTS = flat_slots([("matrix", (40, 24)), ("conv", (8, 4, 3, 3)), ("vector", (70,))])
WORKERS = 2
BAD = {2: torch.inf, 3: torch.nan, 5: 3e38}
"""By step, what a value of rank 1 is."""

MORE: list[tuple[str, dict[str, Any]]] = [
    ("topk", {"memory": "dgc", "route": "sharded"}),
    ("fp16", {"memory": "residual"}),
    ("efsignsgd", {"memory": "momentum"}),
    ("qsgd", {"memory": "diana"}),
    ("randomk", {"memory": "ef21"}),
]


def averages(name: str, choices: dict[str, Any], rollback: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    """What seven steps give, and what rank 0 then remembers."""
    everything = DensePolicy(below=0, vectors=False)
    world = LocalWorld(Configuration.make(name, {}, dense=everything, **choices), SLOTS, WORKERS)
    if rollback:
        for engine in world.engines:
            engine.guards.append(Rollback(engine, {slot.name: torch.float32 for slot in SLOTS}))
    given = []
    for step in range(7):
        generator = torch.Generator().manual_seed(step)
        gradients = [torch.randn(SLOTS[-1].stop, generator=generator) for _ in range(WORKERS)]
        if step in BAD:
            gradients = [0.0001 * gradient for gradient in gradients]  # which would need less room
            gradients[1][SLOTS[1].offset + 7] = BAD[step]
        world.average(gradients)
        given.append(gradients[0])
    world.engines[0].later.settle()
    state = world.engines[0].store.state()
    return given, {f"{field} of {name}": value for field, kept in state.items() for name, value in kept.items()}


def check(name: str, choices: dict[str, Any], rollback: bool = False) -> None:
    known, remembered = averages(name, choices, rollback)
    with mock.patch.object(deferred, "at_hand", return_value=False):
        deferring, kept = averages(name, choices, rollback)
    for step, (left, right) in enumerate(zip(known, deferring, strict=True)):
        assert same(left, right), f"step {step}"
    assert remembered.keys() == kept.keys()
    for field, value in remembered.items():
        assert torch.equal(value, kept[field]), field


@pytest.mark.parametrize("name", methods.names())
def test_a_method_defers_to_the_same_bits(name: str) -> None:
    check(name, {})


@pytest.mark.parametrize(("name", "choices"), MORE)
def test_a_choice_defers_to_the_same_bits(name: str, choices: dict[str, Any]) -> None:
    check(name, choices)


class Flipping:
    """A line that changes a bit of every payload that it gathers."""

    def __init__(self, inner: LocalTransport) -> None:
        self._inner = inner
        self.rank, self.world_size = inner.rank, inner.world_size

    def all_gather(self, payload: Tensor, straight: bool = False) -> Pending:
        pending = self._inner.all_gather(payload, straight)

        def wait() -> Tensor:
            rows = pending()
            rows[0, 5] ^= 16
            return rows

        return wait


@pytest.mark.parametrize("deferring", [True, False])
def test_a_payload_that_was_changed_is_found_in_the_next_step_at_the_latest(deferring: bool) -> None:
    choices = Configuration.make("topk", {}, dense=DensePolicy(below=0, vectors=False), route="gather")
    world = LocalWorld(choices, SLOTS, WORKERS, around=lambda inner: CheckedTransport(Flipping(inner), Meter()))
    gradients = [torch.randn(SLOTS[-1].stop) for _ in range(WORKERS)]
    with mock.patch.object(deferred, "at_hand", return_value=not deferring):
        if deferring:
            world.average(gradients)
        with pytest.raises(PayloadError, match=r"all-gather of .* from rank 0 to rank 0 does not fit its checksum"):
            world.average(gradients)


@pytest.mark.parametrize("name", ["inceptionn", "topk"])
def test_what_comes_later_is_taken_back_with_its_step(name: str) -> None:
    check(name, {}, rollback=True)
