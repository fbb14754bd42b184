"""Two machines, raced with a small model in one network."""

from __future__ import annotations

import os

import pytest

from gradwire_bench.machines import parts, race
from gradwire_bench.shapes import get, numel
from pool import Pool


def raced(way: str, methods: list[str]) -> list[tuple[str, float, float, str]]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rows = race(get("tiny"), methods, 1, way)
    return [(row.method, row.seconds, row.ratio, str(row)) for row in rows]


@pytest.mark.parametrize(("way", "method"), [("hsdp", "acpsgd:rank=2"), ("ddp", "topk:ratio=0.01,inside=2")])
def test_every_contender_has_a_row(pool: Pool, way: str, method: str) -> None:
    first, *others = pool.run(4, raced, way, ["ddp", "floor", method])
    assert [method for method, _, _, _ in first] == ["ddp", "floor", method]
    assert all([row[:2] for row in each] == [row[:2] for row in first] for each in others)
    own, floor, compressed = first
    assert own[2] == floor[2] == 1 < compressed[2]
    assert "times fewer bytes between machines" in compressed[3]
    assert own[3].startswith("torch's own average: ")


def test_parts_are_all_of_the_model() -> None:
    cut = parts(get("resnet50"))
    assert [each for part in cut for each in part] == list(get("resnet50"))
    assert 8 < len(cut) < 16
    assert max(map(numel, cut)) < 5_000_000
