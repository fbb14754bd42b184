"""Time to target quality: until a training over a link is nearly as good as dense averages end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gradwire_bench.cell import Cell, Record

SHARE = 0.97
"""Of the quality at the last point of dense averages' curve."""

LEAST_POINTS = 3
"""Of a curve, below which it says nothing of when a training was how good."""


def targeted(records: Sequence[Record]) -> list[Record]:
    """The same records, trainings over a link with the target of their heat and the seconds to it.

    The target is :data:`SHARE` of what dense averages have at the end of their own curve, in the same setting and
    under the same seed. A training has none where dense averages were not measured, have a curve of fewer than
    :data:`LEAST_POINTS`, or were there at its first point: then nothing was learnt that could be waited for.
    """
    targets: dict[object, float] = {}
    for each in records:
        curve = each.result.get("curve", ())
        if (
            each.cell.is_baseline
            and len(curve) >= LEAST_POINTS
            and curve[0]["accuracy"] < SHARE * curve[-1]["accuracy"]
        ):
            targets[_heat(each.cell)] = SHARE * curve[-1]["accuracy"]
    return [_with(each, targets.get(_heat(each.cell))) if "curve" in each.result else each for each in records]


def _heat(cell: Cell) -> object:
    return cell.setting("method", "granularity", "route", "every")


def _with(record: Record, target: float | None) -> Record:
    curve = record.result["curve"]
    reached = None if target is None else next((p["seconds"] for p in curve if p["accuracy"] >= target), None)
    return replace(record, result={**record.result, "target_accuracy": target, "seconds_to_target": reached})
