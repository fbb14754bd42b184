"""What changed between two runs of a suite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradwire_bench.suite.cell import Cell, Record
from gradwire_bench.suite.measures import MEASURES
from gradwire_bench.suite.tables import by_seed, mean

ALWAYS = ("quality", "loss", "bytes", "bits", "error")
"""Figures that are the same on one machine; any change is one of the program."""
TIMES = ("seconds", "peak_bytes")


@dataclass(frozen=True)
class Change:
    """One figure of one cell, over all seeds that both runs have.

    Attributes:
        cell: Of the first seed.
        measure: Its name.
        before: In the first run.
        after: In the second.
        share: The change as a share of what it was.
        better: Whether it went the right way; None if it did not change.
        beyond: Whether the ranges over the seeds do not overlap.
    """

    cell: Cell
    measure: str
    before: float
    after: float
    share: float
    better: bool | None
    beyond: bool


def changes(before: Sequence[Record], after: Sequence[Record], least: float) -> Iterator[Change]:
    """Figures that changed by more than a share, cell by cell.

    Args:
        before: A run.
        after: Another.
        least: The least change of a time or of memory, as a share; other figures are told whatever changed.
    """
    common = {each.cell for each in before if not each.error} & {each.cell for each in after if not each.error}
    groups = {group[0].cell.setting("seed"): group for group in by_seed([r for r in after if r.cell in common])}
    for group in by_seed([each for each in before if each.cell in common]):
        others = groups[group[0].cell.setting("seed")]
        for name in (*ALWAYS, *TIMES):
            was, now = mean(group, name), mean(others, name)
            if was is None or now is None or was == now:
                continue
            share = (now - was) / abs(was) if was else float("inf")
            if name in TIMES and abs(share) < least:
                continue
            ends = [[value for r in side if (value := MEASURES[name].of(r)) is not None] for side in (group, others)]
            apart = max(ends[0]) < min(ends[1]) or max(ends[1]) < min(ends[0])
            yield Change(group[0].cell, name, was, now, share, (now > was) == MEASURES[name].more_is_better, apart)


def lost_and_found(before: Sequence[Record], after: Sequence[Record]) -> tuple[list[Cell], list[Cell]]:
    """Cells that had a result in the first run only, and in the second only."""
    had, have = ({each.cell for each in records if not each.error} for records in (before, after))
    return [r.cell for r in before if r.cell in had - have], [r.cell for r in after if r.cell in have - had]
