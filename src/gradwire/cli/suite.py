"""``gradwire bench suite | compare`` and ``gradwire reproduce``: many measurements as one."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from gradwire import own
from gradwire.cli.arguments import Dataset, Device, Filters, Flag, Jobs, OutputFolder
from gradwire.cli.bench import bench
from gradwire.cli.output import new_console, wrote

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.table import Table

    from gradwire_bench.cell import Cell, Record
    from gradwire_bench.suite.claims import Finding
    from gradwire_bench.suite.plan import Plan

REPORT = "report.html"


@bench.command
def suite(
    *,
    preset: str = "small",
    out: OutputFolder = Path("results/suite"),
    only: Filters = None,
    jobs: Jobs = None,
    dataset: Dataset = "auto",
    device: Device = "cpu",
    plan: Flag = False,
    report: Flag = False,
) -> None:
    """Measure a whole plan: real tasks, networks, codecs; and leave a report to look at.

    Shows the plan with an estimate of its duration first. What has been measured is on disk at once, a record a cell,
    and a run goes on from there; a cell that fails has its reason in the report. The report is one HTML file.

    ```
    gradwire bench suite --preset small --out results/small
    gradwire bench suite --preset full --only workload=lstm --only seed=0
    gradwire bench suite --plan
    gradwire bench suite --out results/small --report
    ```

    Args:
        preset: small, in under 20 minutes on two cores; full, over several sittings; or a .toml file of your own.
        out: Folder for the records (cells.jsonl) and the report (report.html).
        only: axis=value, such as link=1gbit; may be repeated, and values of one axis are alternatives. The axes are
            kind, workload, method, granularity, optimizer, rate, workers, link, steps, batch, every, route, framework,
            backend, device, seed.
        jobs: Trainings in one process that run side by side; as many as there are cores if not given.
        dataset: The images: auto takes Fashion-MNIST where it can be had, else the digits of scikit-learn.
        device: cuda trains on GPUs what the plan has on processors.
        plan: Only show the plan.
        report: Measure nothing: only write the report of what has been measured.
    """
    from gradwire_bench.origin import require, write_text
    from gradwire_bench.suite import page
    from gradwire_bench.suite.plan import load

    chosen, command = _placed(load("presets", preset), ["bench", "suite", "--preset", preset], dataset, device)
    require("jinja2", "matplotlib")
    records = _measure(new_console(), chosen, out, only, jobs, dataset, command, plan_only=plan, report_only=report)
    if records is not None:
        write_text(out / REPORT, page.html(records, chosen.title, chosen.about))
        wrote(out / REPORT)


@bench.command
def compare(
    before: Path,
    after: Path,
    /,
    *,
    least: Annotated[float, Parameter(validator=Number(gte=0))] = 0.05,
    all: Flag = False,
) -> None:
    """Say what changed between two runs of a suite.

    Told is what is more than chance: quality and loss by their differences seed by seed, of three seeds at least; times
    by more than --least, and by more than steps differ from one another; memory by more than --least and than seeds
    differ; bytes, bits and errors of codecs always. The rest is counted; --all lists it, too.

    ```
    gradwire bench compare results/main results/branch
    gradwire bench compare before.jsonl after.jsonl --least 0.2
    ```

    Args:
        before: Folder of a run, or a file that --json of bench sync, train, kernels or codecs wrote.
        after: Another.
        least: Least change of times and memory that is told, as a share.
        all: List changes that may be chance, too.
    """
    from gradwire_bench.suite.compare import changes, lost_and_found, same_bits
    from gradwire_bench.suite.ledger import Ledger
    from gradwire_bench.suite.measures import MEASURES
    from gradwire_bench.suite.tables import label
    from gradwire_bench.terminal import table

    console = new_console()
    first, second = (Ledger.read(place).records() for place in (before, after))
    found = list(changes(first, second, least))
    shown = table(f"{before} to {after}", "cell", "method", "figure", "before", "after", "change", words=3)
    for change in (each for each in found if all or each.beyond):
        cell, measure = change.cell, MEASURES[change.measure]
        place = {"trial": cell.optimizer, "codec": f"{cell.steps} steps in"}.get(cell.kind, cell.link)
        where = ", ".join((f"{cell.kind} {cell.workload}", place, *cell.unusual))
        style = ("green" if change.better else "red") if change.beyond else "dim"
        texts = (measure.text(change.before), measure.text(change.after), f"{change.share:+.1%}")
        shown.add_row(where, label(cell), measure.title, *texts, style=style)
    lost, gained = lost_and_found(first, second)
    common = len({each.cell for each in first} & {each.cell for each in second})
    nothing = "Nothing changed beyond chance." if common else "The two runs have no cell in common."
    console.print(shown if shown.row_count else nothing)
    if not all and (chance := sum(not each.beyond for each in found)):
        console.print(f"{chance} figures differ by no more than chance may; --all lists them.")
    if counts := same_bits(first, second)[1]:
        console.print(f"{same_bits(first, second)[0]} of {counts} trainings ended with the same bits.")
    for cells, what in zip((lost, gained), ("only in the first", "only in the second"), strict=True):
        if cells:
            console.print(f"{len(cells)} cells {what}, such as {cells[0].kind} {cells[0].workload} {label(cells[0])}.")


def reproduce(
    paper: str = "",
    /,
    *,
    out: OutputFolder | None = None,
    docs: OutputFolder | None = None,
    only: Filters = None,
    jobs: Jobs = None,
    dataset: Dataset = "auto",
    device: Device = "cpu",
    plan: Flag = False,
    report: Flag = False,
) -> None:
    """Run a paper's experiments again, smaller, and say of each claim whether it holds.

    A recipe, one TOML file a paper, has the published settings, what is smaller here and why, the cells to measure and
    the claims to decide. A run goes on where an earlier one stopped. Without a paper, lists those that there are.

    ```
    gradwire reproduce
    gradwire reproduce layerwise --plan
    gradwire reproduce layerwise --docs docs/reproductions
    gradwire reproduce layerwise --docs docs/reproductions --report
    gradwire reproduce my_paper.toml --out results/mine
    ```

    Args:
        paper: Name of a recipe, or a .toml file of your own.
        out: Folder for the records; results/reproduce/PAPER if not given.
        docs: Write the page PAPER.md to this folder, and its picture to the folder images beside it.
        only: axis=value, as for gradwire bench suite.
        jobs: Trainings in one process that run side by side; as many as there are cores if not given.
        dataset: The images: auto takes Fashion-MNIST where it can be had, else the digits of scikit-learn.
        device: cuda trains on GPUs what the plan has on processors.
        plan: Only show the plan.
        report: Measure nothing: only judge, and write the page, of what has been measured.
    """
    from gradwire_bench.origin import require, write_text
    from gradwire_bench.suite import reproduction, verdicts
    from gradwire_bench.suite.plan import load, papers

    console = new_console()
    if not paper:
        for name in papers():
            console.print(f"{name:12} {load('papers', name).title}")
        return
    require("matplotlib", "scipy")
    chosen, command = _placed(load("papers", paper), ["reproduce", paper], dataset, device)
    folder = out or Path("results/reproduce") / chosen.name
    records = _measure(console, chosen, folder, only, jobs, dataset, command, plan_only=plan, report_only=report)
    if records is None:
        return
    found = reproduction.findings(chosen, records)
    console.print(_verdicts(chosen, found))
    if docs is not None:
        verdicts.draw(found, docs.parent / reproduction.picture(chosen))
        write_text(docs / f"{chosen.name}.md", reproduction.page(chosen, records, found, command))
        wrote(docs / f"{chosen.name}.md")


def _placed(plan: Plan, words: Sequence[str], dataset: Dataset, device: Device) -> tuple[Plan, str]:
    """A plan with the models on a device, and what measures it anywhere: its command with all that changes figures."""
    from gradwire_bench import placement

    command = ["gradwire", *words]
    for given in own.listed():
        command += ["--import", os.path.relpath(given) if given.endswith(".py") else given]
    if dataset != "auto":
        command += ["--dataset", dataset]
    if device != "cpu":
        placement.check(device)
        plan, command = plan.on(device), [*command, "--device", device]
    return plan, shlex.join(command)


def _measure(
    console: Console,
    plan: Plan,
    folder: Path,
    only: Sequence[str] | None,
    jobs: int | None,
    dataset: Dataset,
    command: str,
    *,
    plan_only: bool,
    report_only: bool,
) -> list[Record] | None:
    """Shows the plan and measures what is missing of it; the records of the whole plan, or None to only show it."""
    from gradwire_bench.suite import estimate
    from gradwire_bench.suite.ledger import Ledger
    from gradwire_bench.suite.run import Runner
    from gradwire_bench.terminal import bars

    ledger = Ledger.read(folder) if report_only else Ledger(folder)
    if not report_only:
        cells = plan.only(only) if only else list(plan.cells)
        missing = ledger.missing(cells)
        side_by_side = jobs or os.cpu_count() or 1
        console.print(_plan(plan, cells, missing))
        if missing:
            with console.status("timing a step of each model"):
                expected = estimate.seconds(missing, side_by_side, dataset)
            console.print(f"{len(missing)} of {len(cells)} cells to measure, about {estimate.duration(expected)}.")
        if plan_only:
            return None
        with bars(console) as progress:
            task = progress.add_task(plan.name, total=len(cells), completed=len(cells) - len(missing), news="starting")

            def tell(news: str, done: int) -> None:
                progress.update(task, advance=done)
                if news:
                    progress.update(task, news=news)

            Runner(ledger, command, dataset, side_by_side).run(cells, tell)
    records = ledger.records(plan.cells)
    failed = [each for each in records if each.error]
    if failed:
        first = f"{failed[0].cell.contender}: {failed[0].error}"
        console.print(f"{len(failed)} cells failed, such as {first}", markup=False)
    done = f"{len(records) - len(failed)} of {len(plan.cells)} cells are in {ledger.path}"
    console.print(done, soft_wrap=True, markup=False)
    return records


def _plan(plan: Plan, cells: Sequence[Cell], missing: Sequence[Cell]) -> Table:
    """A line for each kind and workload."""
    from gradwire_bench.terminal import table

    shown = table(plan.title, "kind", "workload", "links", "methods", "seeds", "cells", "to measure", words=3)
    for kind, workload in dict.fromkeys((cell.kind, cell.workload) for cell in cells):
        here = [cell for cell in cells if (cell.kind, cell.workload) == (kind, workload)]
        shown.add_row(
            kind,
            workload,
            ", ".join(dict.fromkeys(cell.link for cell in here)) if kind in ("train", "local", "sync") else "",
            str(len({cell.contender for cell in here})),
            str(len({cell.seed for cell in here})),
            str(len(here)),
            str(sum(cell in missing for cell in here)),
        )
    return shown


def _verdicts(plan: Plan, found: Sequence[Finding]) -> Table:
    from rich.text import Text

    from gradwire_bench.terminal import table

    colours = {"holds": "green", "does not hold": "red", "cannot tell": "yellow"}
    shown = table(plan.title, "claim", "obtained", "verdict", words=3)
    for each in found:
        shown.add_row(each.claim.text, each.said, Text(each.verdict, colours[each.verdict]))
    return shown
