"""What ``gradwire bench gpu`` found, in plain text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gradwire_bench.cell import Record
from gradwire_bench.gpu_operations import TARGETS
from gradwire_bench.gpu_steps import TASKS

_NOT_SHOWN = ("reached", "target", "found", "group", "streams", "copy_gbps", "bytes_per_value")
_NAMED = 3
"""Subjects that a verdict names."""


def claims(part: str) -> dict[str, str]:
    """What a part is to show, by the group of subjects that show it."""
    kind, _, what = part.partition(":")
    match kind:
        case "kernels":
            numel = f"{int(what) / 1e6:g} M values"
            return {
                group: f"{group}, {numel}: at least {target:.0%} of a copy's bandwidth"
                for group, target in TARGETS.items()
                if int(what) > 10**6
            }
        case "step":
            return {"": f"{what}, a step at world size 1: at most {TASKS[what].most_added:.0%} over DDP's"}
        case "bits":
            return {"": "bits of every kernel are the CPU's"}
        case "methods":
            return {"": "averages of every method have the CPU's bits, or are as close as projections"}
        case "waits":
            return {"": "the host waits for nothing within a step"}
        case "memory":
            return {"": "memory is what docs/gpus.md states"}
        case "ranks":
            return {"": "two ranks on one GPU end with the same bits, one way or another"}
        case _:
            return {}


def by_part(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records of each part; of some they came in turns."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record.cell.workload, []).append(record)
    return found


def verdicts(records: Sequence[Record]) -> Iterator[str]:
    """A line for each target: whether it is reached, by how many of what was held to it, and what misses it."""
    for part, own in by_part(records).items():
        for name, claim in claims(part).items():
            held = [each for each in own if not name or each.result.get("group") == name]
            judged = [each for each in held if each.result.get("reached") is not None]
            missed = [each.cell.method for each in judged if not each.result["reached"]]
            broken = [each.cell.method for each in own if each.error]
            enough = len(missed) < len(judged) if part == "ranks" else not missed
            verdict = "unknown" if not judged else "reached" if enough else "MISSED "
            news = f"{len(judged) - len(missed)} of {len(judged)}"
            news += f"; not: {_few(missed)}" if missed else ""
            yield f"{verdict}  {claim}: {news}" + (f"; could not be measured: {_few(broken)}" if broken else "")


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def lines(records: Sequence[Record]) -> Iterator[str]:
    """All of it, the verdicts first."""
    yield from verdicts(records)
    if records:
        yield ""
        yield ", ".join(f"{name} {_value(value)}" for name, value in records[0].machine.items())
    for part, own in by_part(records).items():
        yield f"\n{part}"
        for record in own:
            yield f"  {record.cell.method:36} {record.error or _figures(record.result)}"


def _figures(result: dict[str, Any]) -> str:
    shown = [f"{name} {_value(value)}" for name, value in result.items() if name not in _NOT_SHOWN]
    if result.get("target") is not None:
        shown.append(f"target {result['target']:g}")
    if result.get("reached") is not None:
        shown.append("reached" if result["reached"] else f"MISSED {result.get('found', '')}".rstrip())
    return ", ".join(shown)


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else ", ".join(value) if isinstance(value, list) else str(value)
