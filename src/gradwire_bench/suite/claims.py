"""What a paper claims, and whether records bear it out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Literal, get_args

from gradwire.errors import ConfigurationError
from gradwire_bench.cell import AXES, Cell, Record
from gradwire_bench.suite.measures import MEASURES

Verdict = Literal["holds", "does not hold", "cannot tell"]
Relation = Literal["better", "equal", "times", "reversal"]

CONFIDENCE = 0.95
LEAST_PAIRS = 3
"""Fewer say nothing of chance."""


@dataclass(frozen=True)
class Claim:
    """One sentence of a paper, as a comparison of cells that differ in nothing else.

    Attributes:
        text: The sentence.
        measure: The figure compared, of :data:`~gradwire_bench.suite.measures.MEASURES`.
        relation: ``"better"``: the first cells have the better figure. ``"equal"``: both are within ``margin`` of each
            other. ``"times"``: the first cells' figure is better by a factor of at least ``margin``. ``"reversal"``:
            two values of ``axis`` have one order at one value of the axis ``over`` and the opposite at another.
        published: What the paper reports of it.
        first: Values of axes.
        second: Values of axes; what the first are compared with.
        margin: In the measure's unit, or a factor.
        where: Values of axes that both have.
        axis: Of a reversal.
        over: Of a reversal.
        reason: Why it may not hold here.
    """

    text: str
    measure: str
    relation: Relation
    published: str = ""
    first: dict[str, Any] = field(default_factory=dict)
    second: dict[str, Any] = field(default_factory=dict)
    margin: float = 0.0
    where: dict[str, Any] = field(default_factory=dict)
    axis: str = "method"
    over: str = "workload"
    reason: str = ""

    @classmethod
    def of(cls, content: dict[str, Any]) -> Claim:
        """From a plan.

        Raises:
            ConfigurationError: If the measure, the relation or an axis is not known.
        """
        margin, reason = float(content.get("margin", 0.0)), content.get("reason", "").strip().replace("\n", " ")
        claim = cls(**{**content, "margin": margin, "reason": reason})
        for name, choices in (("measure", MEASURES), ("relation", get_args(Relation))):
            if (value := getattr(claim, name)) not in choices:
                raise ConfigurationError(f"{name}={value!r} is not known; choose one of {', '.join(choices)}")
        if unknown := {*claim.first, *claim.second, *claim.where, claim.axis, claim.over} - AXES.keys():
            raise ConfigurationError(f"a claim has no axis {sorted(unknown)}; its axes are {', '.join(AXES)}")
        return claim


@dataclass(frozen=True)
class Finding:
    """What records say of a claim.

    Attributes:
        claim: The claim.
        verdict: What it comes to.
        said: The figures, in a line.
        pairs: Comparisons.
        interval: Low end, mean and high end of the difference or of the factor, in the measure's unit.
    """

    claim: Claim
    verdict: Verdict
    said: str
    pairs: int
    interval: tuple[float, float, float] | None = None


def judge(claim: Claim, records: Sequence[Record]) -> Finding:
    """Compares pair by pair: cells that differ in nothing but what the claim compares.

    The verdict goes by the interval of the mean difference at 95 %, Student's t over all pairs: it holds if the whole
    interval is on the claimed side, does not hold if the whole interval is on the other one, and else, or with fewer
    than three pairs, we cannot tell.
    """
    known = [each for each in records if not each.error and each.cell.matches(claim.where)]
    if claim.relation == "reversal":
        return _reversal(claim, known)
    measure = MEASURES[claim.measure]
    verdict: Verdict
    pairs = list(_pairs(known, claim.first, claim.second, claim.measure))
    if len(pairs) < LEAST_PAIRS:
        return Finding(claim, "cannot tell", f"{len(pairs)} pairs, fewer than {LEAST_PAIRS}", len(pairs))
    if claim.relation == "times":
        ratios = [math.log(one / other) for one, other in pairs if one > 0 and other > 0]
        low, mean, high = (math.exp(each) for each in interval(ratios))
        if not measure.more_is_better:
            low, mean, high = 1 / high, 1 / mean, 1 / low
        said = f"better by a factor of {mean:.3g} ({low:.3g} to {high:.3g}), {len(pairs)} pairs"
        verdict = "holds" if low >= claim.margin else "does not hold" if high < claim.margin else "cannot tell"
        return Finding(claim, verdict, said, len(pairs), (low, mean, high))
    low, mean, high = interval([measure.scale * (one - other) for one, other in pairs])
    said = f"{mean:+.2f} {measure.unit} ({low:+.2f} to {high:+.2f}), {len(pairs)} pairs"
    said += _by_workload(claim, known)
    if claim.relation == "equal":
        yes, no = -claim.margin <= low and high <= claim.margin, low > claim.margin or high < -claim.margin
    else:
        yes, no = (low > 0, high < 0) if measure.more_is_better else (high < 0, low > 0)
    verdict = "holds" if yes else "does not hold" if no else "cannot tell"
    return Finding(claim, verdict, said, len(pairs), (low, mean, high))


def _by_workload(claim: Claim, records: Sequence[Record]) -> str:
    """The mean difference on each workload, where there are several."""
    measure, parts = MEASURES[claim.measure], []
    for name in dict.fromkeys(each.cell.workload for each in records):
        here = [each for each in records if each.cell.workload == name]
        pairs = list(_pairs(here, claim.first, claim.second, claim.measure))
        if pairs:
            parts.append(f"{name} {measure.scale * statistics.fmean(one - other for one, other in pairs):+.2f}")
    return f": {', '.join(parts)}" if len(parts) > 1 else ""


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Low end, mean and high end at 95 % by Student's t; no width for values that are all alike."""
    from scipy.stats import t

    mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    reach = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * error
    return mean - reach, mean, mean + reach


def _pairs(
    records: Sequence[Record], first: dict[str, Any], second: dict[str, Any], measure: str
) -> Iterator[tuple[float, float]]:
    """Figures of the first and of the second cells that have everything else in common."""
    apart = {*first, *second}
    others = {
        each.cell.setting(*apart): value
        for each in records
        if each.cell.matches(second) and (value := MEASURES[measure].of(each)) is not None
    }
    for each in records:
        value = MEASURES[measure].of(each)
        if each.cell.matches(first) and value is not None and (key := each.cell.setting(*apart)) in others:
            yield value, others[key]


def _reversal(claim: Claim, records: Sequence[Record]) -> Finding:
    """Two values of an axis whose order in one place is the opposite of that in another, both beyond doubt."""
    values, places = (
        list(dict.fromkeys(getattr(each.cell, axis) for each in records)) for axis in (claim.axis, claim.over)
    )
    found: list[int | None] = []
    for one, other in combinations(values, 2):
        signs = {place: _sign(claim, records, one, other, place) for place in places}
        found += signs.values()
        up = [str(place) for place, sign in signs.items() if sign == 1]
        down = [str(place) for place, sign in signs.items() if sign == -1]
        if up and down:
            said = f"{one} is ahead of {other} at {', '.join(up)} and behind it at {', '.join(down)}"
            return Finding(claim, "holds", said, len(found))
    verdict: Verdict = "does not hold" if len(places) > 1 and all(found) else "cannot tell"
    return Finding(claim, verdict, f"no two of {len(values)} change places beyond doubt", len(found))


def _sign(claim: Claim, records: Sequence[Record], one: object, other: object, place: object) -> int | None:
    """1 if the first is better in a place beyond doubt, -1 if it is worse, 0 if that is open."""
    here = [each for each in records if getattr(each.cell, claim.over) == place]
    pairs = list(_pairs(here, {claim.axis: one}, {claim.axis: other}, claim.measure))
    if len(pairs) < LEAST_PAIRS:
        return None
    low, _, high = interval([a - b for a, b in pairs])
    ahead = 1 if MEASURES[claim.measure].more_is_better else -1
    return ahead if low > 0 else -ahead if high < 0 else 0


def undecidable(claims: Sequence[Claim], cells: Sequence[Cell]) -> list[str]:
    """Claims that no cells can decide: a slip of the pen in a plan."""
    return [
        claim.text
        for claim in claims
        if not all(any(cell.matches({**claim.where, **side}) for cell in cells) for side in (claim.first, claim.second))
    ]
