"""A paper's page: published against obtained, with a verdict on each claim."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gradwire_bench.cell import Record
from gradwire_bench.suite.claims import LEAST_PAIRS, Finding, judge
from gradwire_bench.suite.measures import MEASURES
from gradwire_bench.suite.page import facts
from gradwire_bench.suite.plan import Plan
from gradwire_bench.suite.tables import tables
from gradwire_bench.suite.targets import targeted


def findings(plan: Plan, records: Sequence[Record]) -> list[Finding]:
    """A verdict on each claim of a paper."""
    return [judge(claim, records) for claim in plan.claims]


def picture(plan: Plan) -> str:
    """Of the intervals, beneath the folder of the documentation."""
    return f"images/reproduction_{plan.name}.png"


def page(plan: Plan, records: Sequence[Record], found: Sequence[Finding], command: str) -> str:
    """``docs/reproductions/PAPER.md``.

    Args:
        plan: The paper's.
        records: What was measured of it.
        found: The verdicts.
        command: What makes the page.
    """
    done = sum(not each.error for each in records)
    parts = [
        f"# {plan.title}\n",
        f"{plan.about}\n",
        *([f"{plan.elsewhere}\n", "## The recipe\n"] if plan.elsewhere else []),
        f"```\n{command}\n```\n",
        f"{done} of {len(plan.cells)} cells of the recipe were measured. "
        "A claim **holds** if the whole interval of the mean difference, 95 % by Student's t over all pairs of cells "
        "that differ in nothing else, is on its side; it **does not hold** if the whole interval is on the other one; "
        "else we cannot tell.\n",
        "| claim | published | obtained | verdict |",
        "|---|---|---|---|",
        *(f"| {each.claim.text} | {each.claim.published} | {_said(each)} | **{each.verdict}** |" for each in found),
        f"\n![the interval of each claim](../{picture(plan)})\n",
        "Grey bands are margins within which figures count as equal.",
        *_failures(found),
        "\n## What is smaller, and why\n",
        *(f"* {what}: {why}." for what, why in plan.scaled),
        "\n## Obtained\n",
        *_tables(records),
        *(f"{name}: {value}  " for name, value in facts(records)),
    ]
    if failed := [each for each in records if each.error]:
        parts += ["\n## What could not be measured\n"]
        parts += [f"* {each.cell.kind} {each.cell.workload} {each.cell.contender}: {each.error}" for each in failed]
    return "\n".join(parts).rstrip() + "\n"


def _failures(found: Sequence[Finding]) -> Iterator[str]:
    """What does not hold, or stays open, and the likely reason."""
    if short := [each for each in found if each.verdict != "holds"]:
        yield "\n## What was not reproduced, and the likely reason\n"
        for each in short:
            reason = each.claim.reason or "No reason is known."
            yield f"* {each.claim.text}: {each.verdict}. {'Not measured yet.' if each.pairs < LEAST_PAIRS else reason}"


def _said(found: Finding) -> str:
    measure = MEASURES[found.claim.measure]
    margin = f", margin {found.claim.margin:g} {measure.unit}" if found.claim.relation == "equal" else ""
    return f"{measure.title}: {found.said}{margin}"


def _tables(records: Sequence[Record]) -> Iterator[str]:
    """As in the report, without the columns in which no row has anything."""
    for table in tables(targeted(records)):
        used = [name for name in table.columns if any(line.values[name].text for line in table.lines)]
        yield f"### {table.title}\n"
        yield f"{table.about}\n"
        yield f"| {' | '.join(used)} |"
        yield f"|{'|'.join('---' if table.columns[name] else '---:' for name in used)}|"
        for line in table.lines:
            yield f"| {' | '.join(line.values[name].text for name in used)} |"
        yield ""
