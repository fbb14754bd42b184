"""What changed between two runs of a suite."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gradwire_bench.cell import Cell, Record
from gradwire_bench.suite.claims import LEAST_PAIRS, interval
from gradwire_bench.suite.measures import MEASURES, times
from gradwire_bench.suite.tables import by_seed

Pairs = Sequence[tuple[Record, Record]]

_LEAST_BYTES = 0.005
"""Of bytes by the interface, in which headers and repeats are, differ by less from run to run."""


@dataclass(frozen=True)
class Change:
    """One figure of one cell, over all seeds that both runs have.

    Attributes:
        cell: Of the first seed.
        measure: Its name.
        before: In the first run.
        after: In the second.
        share: The change as a share of what it was.
        better: Whether it went the right way.
        beyond: Whether it is more than seeds and repeats differ by anyway.
    """

    cell: Cell
    measure: str
    before: float
    after: float
    share: float
    better: bool
    beyond: bool


def changes(before: Sequence[Record], after: Sequence[Record], least: float) -> Iterator[Change]:
    """Figures that are not the same, cell by cell.

    Quality and loss changed beyond noise if the 95 % interval of the differences, seed by seed, leaves out zero, which
    takes three seeds; a time, if it changed by more than ``least`` and the middle halves of its steps do not overlap;
    memory, if it changed by more than ``least`` and the ranges over the seeds do not overlap; bits and errors of
    codecs, in which there is no chance, always; bytes, if by more than a two-hundredth.

    Args:
        before: A run.
        after: Another.
        least: The least change of a time or of memory that counts, as a share.
    """
    later = {each.cell: each for each in after if not each.error}
    for group in by_seed([each for each in before if each.cell in later]):
        pairs = [(each, later[each.cell]) for each in group]
        for name, proof in _PROOFS.items():
            values = [
                (was, now)
                for one, other in pairs
                if (was := MEASURES[name].of(one)) is not None and (now := MEASURES[name].of(other)) is not None
            ]
            if all(was == now for was, now in values):
                continue
            was, now = (statistics.fmean(side) for side in zip(*values, strict=True))
            share = (now - was) / abs(was) if was else float("inf")
            better = (now > was) == MEASURES[name].more_is_better
            yield Change(group[0].cell, name, was, now, share, better, proof(values, pairs, share, least))


def same_bits(before: Sequence[Record], after: Sequence[Record]) -> tuple[int, int]:
    """How many trainings ended with the same parameters to the bit, of how many that both runs have."""
    ends = [{each.cell: end for each in side if (end := each.result.get("parameters"))} for side in (before, after)]
    both = ends[0].keys() & ends[1].keys()
    return sum(ends[0][cell] == ends[1][cell] for cell in both), len(both)


def lost_and_found(before: Sequence[Record], after: Sequence[Record]) -> tuple[list[Cell], list[Cell]]:
    """Cells that had a result in the first run only, and in the second only."""
    had, have = ({each.cell for each in records if not each.error} for records in (before, after))
    return [r.cell for r in before if r.cell in had - have], [r.cell for r in after if r.cell in have - had]


Values = Sequence[tuple[float, float]]


def _by_seeds(values: Values, pairs: Pairs, share: float, least: float) -> bool:
    if len(values) < LEAST_PAIRS:
        return False
    low, _, high = interval([now - was for was, now in values])
    return low > 0 or high < 0


def _by_steps(values: Values, pairs: Pairs, share: float, least: float) -> bool:
    halves = [[_middle(times(each)) for each in side] for side in zip(*pairs, strict=True)]
    return abs(share) >= least and _apart(*([end for half in side for end in half] for side in halves))


def _by_range(values: Values, pairs: Pairs, share: float, least: float) -> bool:
    return abs(share) >= least and _apart(*zip(*values, strict=True))


def _by_size(values: Values, pairs: Pairs, share: float, least: float) -> bool:
    return abs(share) >= _LEAST_BYTES


def _by_itself(values: Values, pairs: Pairs, share: float, least: float) -> bool:
    return True


_PROOFS: dict[str, Callable[[Values, Pairs, float, float], bool]] = {
    "quality": _by_seeds,
    "loss": _by_seeds,
    "bytes": _by_size,
    "bits": _by_itself,
    "error": _by_itself,
    "seconds": _by_steps,
    "peak_bytes": _by_range,
}


def _middle(seconds: Sequence[float]) -> tuple[float, float]:
    """The ends of the middle half."""
    if len(seconds) < 2:
        return seconds[0], seconds[0]
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return low, high


def _apart(one: Sequence[float], other: Sequence[float]) -> bool:
    return max(one) < min(other) or max(other) < min(one)
