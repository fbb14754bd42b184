"""The report of a suite as one HTML file that opens from disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gradwire_bench.cell import Record
from gradwire_bench.origin import hardware, require
from gradwire_bench.suite.plots import plots
from gradwire_bench.suite.tables import tables
from gradwire_bench.suite.targets import targeted

TEMPLATE = Path(__file__).with_name("report.html.jinja")


def html(records: Sequence[Record], title: str, about: str) -> str:
    """The page: facts, pictures, tables that sort, failures. Nothing in it is loaded from elsewhere.

    Args:
        records: What was measured.
        title: Of the page.
        about: A sentence or two below it.

    Raises:
        ConfigurationError: If a library that it takes is not installed.
    """
    require("jinja2", "matplotlib")
    from jinja2 import Environment, StrictUndefined

    records = targeted(records)
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True).from_string(
        TEMPLATE.read_text(encoding="utf-8")
    )
    return template.render(
        title=title,
        about=about,
        facts=facts(records),
        plots=list(plots(records)),
        tables=tables(records),
        failed=[each for each in records if each.error],
    )


def facts(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Where, when and with what it was measured."""
    machines = list(dict.fromkeys(_machine(each) for each in records))
    versions = list(dict.fromkeys(_versions(each) for each in records))
    dates = sorted(each.date for each in records)
    seeds = sorted({each.cell.seed for each in records})
    return [
        ("machine", "; ".join(machines)),
        ("versions", "; ".join(versions)),
        ("measured", f"{_minute(dates[0])} to {_minute(dates[-1])} UTC" if dates else "nothing yet"),
        ("cells", f"{len(records)}, {sum(bool(each.error) for each in records)} of them failed"),
        ("seeds", ", ".join(map(str, seeds))),
        ("time", f"{sum(each.seconds for each in records) / 60:.1f} minutes of all cells together"),
    ]


def _minute(date: str) -> str:
    return date[:16].replace("T", " ")


def _machine(record: Record) -> str:
    facts = record.machine
    return f"{hardware(facts)}, {facts['system']}"


def _versions(record: Record) -> str:
    names = ("gradwire", "torch", "numpy", "numba", "python")
    return ", ".join(f"{name} {record.machine[name]}" for name in names)
