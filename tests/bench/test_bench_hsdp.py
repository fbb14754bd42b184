"""Hybrid sharding, raced with a small model in one network."""

from __future__ import annotations

from gradwire_bench.hsdp import parts, race
from gradwire_bench.shapes import get, numel
from pool import Pool


def raced() -> list[tuple[str, float, float, str]]:
    rows = race(get("tiny"), ["ddp", "floor", "acpsgd:rank=2"], steps=1)
    return [(row.method, row.seconds, row.ratio, str(row)) for row in rows]


def test_every_contender_has_a_row(pool: Pool) -> None:
    first, *others = pool.run(4, raced)
    assert [method for method, _, _, _ in first] == ["ddp", "floor", "acpsgd:rank=2"]
    assert all(each == first for each in others)
    own, floor, compressed = first
    assert own[2] == floor[2] == 1 < compressed[2]
    assert "times fewer bytes between machines" in compressed[3]
    assert own[3].startswith("FSDP2's own average: ")


def test_parts_are_all_of_the_model() -> None:
    cut = parts(get("resnet50"))
    assert [each for part in cut for each in part] == list(get("resnet50"))
    assert 8 < len(cut) < 16
    assert max(map(numel, cut)) < 5_000_000
