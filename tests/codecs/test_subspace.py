"""The buffer in which rows are split: however few bits there are, nothing beside it is read or written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradwire.engine.choices import Choices
from gradwire.engine.mixture import configure
from gradwire.layout import flat_slots
from gradwire.local import LocalWorld
from gradwire.memory import Store

BESIDE = 1 << 21
"""Elements: twice the largest tile."""

NARROW = flat_slots([("embed", (700, 10)), ("weight", (64, 12)), ("bias", (12,))])
"""Rows of few values, so that there are nearly as many coordinates."""


@pytest.mark.parametrize("granularity", ["model", "bucket"])
@pytest.mark.parametrize("route", ["gather", "sharded"])
@pytest.mark.parametrize(("bits", "rank"), [(0.005, 4), (0.005, 9), (0.007, 9), (0.1, 4), (4, 9)])
def test_few_bits_have_room_for_their_tiles(
    bits: float, rank: int, route: str, granularity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []

    def scratch(store: Store, numel: int, purpose: str = "") -> Tensor:
        taken.append((torch.full((numel + BESIDE,), torch.nan), numel))
        return taken[-1][0][:numel]

    monkeypatch.setattr(Store, "scratch", scratch)
    line = f"subspace:bits={bits},rank={rank},route={route},granularity={granularity}"
    world = LocalWorld(configure(line, {}, Choices()), NARROW, workers=2, bucket_bytes=4)
    for step in range(3):
        torch.manual_seed(step)
        gradients = [torch.randn(NARROW[-1].stop) for _ in world.engines]
        world.average(gradients)
        assert all(each.isfinite().all() for each in gradients)
    assert taken
    assert all(whole[numel:].isnan().all() for whole, numel in taken)
