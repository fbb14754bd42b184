"""What all buckets work in, one after another: it lets nothing of one come into another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.engine.choices import Choices
from gradwire.engine.mixture import configure
from gradwire.layout import flat_slots
from gradwire.local import LocalWorld
from gradwire.memory import Residual, Store

SLOTS = flat_slots([("embed", (70, 64)), ("deep", (40, 5, 3, 3)), ("weight", (96, 80)), ("bias", (96,)), ("one", ())])

HALF = Residual(dtype="bfloat16")


def left(method: str, memory: Residual | None) -> list[Tensor]:
    """Averages of four steps of three workers and what they remember, the last step with a value that is not finite.

    Buckets are encoded side by side, and decoded in turn.
    """
    choices: dict[str, Any] = {} if memory is None else {"memory": memory}
    world = LocalWorld(configure(method, {}, Choices(**choices)), SLOTS, workers=3, bucket_bytes=4)
    found = []
    for step in range(4):
        torch.manual_seed(step)
        gradients = [torch.randn(SLOTS[-1].stop) for _ in world.engines]
        if step == 3:
            gradients[0][0] = torch.inf
        world.average(gradients)
        found += gradients
    states = [engine.store.state() for engine in world.engines]
    return found + [kept.float() for state in states for views in state.values() for kept in views.values()]


@pytest.mark.parametrize(
    ("method", "memory"),
    [
        ("subspace:bits=1,granularity=bucket,route=gather", None),
        ("subspace:bits=1,granularity=bucket,route=sharded", None),
        ("subspace:bits=1,granularity=bucket,route=gather", HALF),
        ("subspace:bits=1,granularity=bucket,route=sharded", HALF),
        ("topk:ratio=0.1,route=gather", HALF),
        ("topk:ratio=0.1,route=sharded", HALF),
        ("lion", None),
    ],
)
def test_buckets_that_share_it_average_as_those_with_their_own(
    method: str, memory: Residual | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What those have of their own holds NaN at first: nothing is read that was not written."""
    shared = left(method, memory)
    taken = []

    def own(store: Store, numel: int, purpose: str = "") -> Tensor:
        taken.append(torch.full((numel,), torch.nan))
        return taken[-1]

    monkeypatch.setattr(Store, "scratch", own)
    apart = left(method, memory)
    assert len(taken) >= len(SLOTS)
    assert all(each.isfinite().all() for each in shared[:9])
    bits = [[each.view(torch.int32) for each in found] for found in (shared, apart)]
    assert all(map(torch.equal, *bits))
