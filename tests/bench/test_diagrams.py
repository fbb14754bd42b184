"""Pictures of how it works show what the program does."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from gradwire_bench import diagrams


def test_the_timeline_has_the_order_of_the_scheduler() -> None:
    work = diagrams.timeline()
    sent = [each for each in work if each.row == "wire"]
    assert [(each.unit, each.round) for each in sent if each.unit is not None] == [
        *((0, 0), (1, 0), (2, 0), (0, 1), (3, 0)),
        *((1, 1), (2, 1), (3, 1)),
    ]
    assert sum(each.unit is None for each in sent) == 1
    assert all(first.stop <= second.start for first, second in pairwise(sent))
    computed = [each for each in work if each.row in ("encode", "decode")]
    assert all(first.stop <= second.start for first, second in pairwise(computed))
    assert [(each.unit, each.round) for each in computed if each.row == "decode"][-1] == (3, 2)


def test_the_parts_are_the_whole_payload() -> None:
    written, parts, count = diagrams.payload()
    assert sum(part.nbytes for part in parts) == written.numel()
    assert all(8 * part.nbytes >= bits * count for part, bits in zip(parts[1:], (4, 6, 1), strict=True))


def test_all_cuts_cover_the_buffer() -> None:
    total = sum(blocks.numel for blocks in diagrams.cuts()[0][1])
    segments = {}
    for name, blocks in diagrams.cuts():
        assert sum(block.numel for block in blocks) == total
        segments[name] = sum(block.segment_count for block in blocks)
    assert (segments["layer"], segments["bucket"], segments["model"]) == (4, 2, 1)


def test_pictures_are_drawn_and_small(tmp_path: Path) -> None:
    diagrams.main(tmp_path)
    assert all(0 < (tmp_path / name).stat().st_size <= 150_000 for name in diagrams.PICTURES)
