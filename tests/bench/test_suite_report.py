"""What the suite says of its records: a report, tables, changes, the page of a paper."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from gradwire_bench.cell import Cell, Record
from gradwire_bench.pictures import figure_of
from gradwire_bench.suite import compare, page, reproduction, run
from gradwire_bench.suite.ledger import Ledger, write
from gradwire_bench.suite.plan import Plan, load
from gradwire_bench.suite.plots import svg
from gradwire_bench.suite.tables import tables
from gradwire_bench.train import TrainRow
from suite_records import of_every_kind, of_plan, record, trial

DOCS = Path(__file__).parents[2] / "docs"


class Page(HTMLParser):
    """What a page has, and what it would load."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: dict[str, int] = {}
        self.loads: list[str] = []
        self.open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "action", "srcset") and value and not value.startswith("#"):
                self.loads.append(value)
        if tag not in ("meta", "br", "input", "link", "path", "use", "rect", "circle"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("path", "use", "rect", "circle"):
            assert self.open.pop() == tag


def test_the_report_is_one_file_with_every_plot_and_table_and_loads_nothing() -> None:
    records = of_every_kind()
    html = page.html(records, "A title", "About <it>.")
    read = Page(html)
    assert read.open == []
    assert read.loads == []
    assert "@import" not in html
    assert "url(http" not in html
    assert read.tags["figure"] == 6
    assert read.tags["svg"] == 6
    assert read.tags["table"] == 5  # four kinds, and what failed
    assert "About &lt;it&gt;." in html
    assert "MovieLens-100k &lt;is&gt; not there" in html
    for each in records:
        if not each.error:
            assert each.command.partition(" --only seed=")[0] in html
    assert " --only seed=0 --only seed=1</code>" in html  # both of a row, in one command
    assert page.html(records, "A title", "About <it>.") == html  # the same records, the same bytes


def test_pictures_are_rounded_and_their_words_are_not() -> None:
    figure, [[axes]] = figure_of((4, 3), 1, 1)
    axes.plot([0, 1], [0, 1 / 3])
    axes.set_title("ratio=0.00125, up to 0.3333 of it")
    drawn = svg(figure)
    assert "ratio=0.00125, up to 0.3333 of it</text>" in drawn
    assert not re.search(r'="[^"]*\d\.\d{3}', drawn)
    assert svg(figure) == drawn


def test_the_report_of_some_kinds_has_their_parts_alone() -> None:
    html = page.html([trial("ddp", 0.9), trial("topk", 0.8)], "A title", "About.")
    assert Page(html).tags["svg"] == 1
    assert "Averages alone" not in html


def test_the_report_of_the_full_suite_stays_under_five_megabytes(tmp_path: Path) -> None:
    plan = load("presets", "full")
    write(tmp_path / "cells.jsonl", of_plan(plan))
    records = Ledger.read(tmp_path).records(plan.cells)
    assert len(records) == len(plan.cells) > 4000
    html = page.html(records, plan.title, plan.about)
    read = Page(html)
    assert (read.tags["svg"], read.tags["table"]) == (6, 5)
    assert len(html.encode()) < 5_000_000


def test_rows_are_over_seeds_and_hooks_without_a_meter_have_their_interface() -> None:
    training, learnt, averages, codecs = tables(of_every_kind())
    assert [len(table.lines) for table in (training, learnt, averages, codecs)] == [4, 4, 8, 2]
    assert [len(line.records) for line in learnt.lines] == [2] * 4
    kilobytes = {line.values["method"].text: line.values["kB a step"].text for line in training.lines}
    assert kilobytes["DDP fp32"] == "0.1"
    assert kilobytes["torch fp16_compress_hook"] == "0.06"
    assert kilobytes["topk ratio=0.01"] == "0.05"
    points = {line.values["method"].text: line.values["points"].text for line in learnt.lines}
    assert points == {
        "DDP fp32": "+0.00",
        "topk ratio=0.01": "-1.00",
        "acpsgd rank=4": "-2.00",
        "torch fp16_compress_hook": "-3.00",
    }


def test_trainings_that_diverged_are_told_and_large_numbers_are_written_out() -> None:
    cell = Cell("train", "alexnet", "ddp", link="1gbit")
    lost = TrainRow("ddp", "DDP fp32", 0.5, loss=math.nan, losses=[2.5, math.inf], step_seconds=[12.3456])
    figures, _ = run.figures(replace(lost, accuracy=0.1, dense_bytes=123_456_789.0))
    assert (figures["loss"], figures["losses"]) == (None, [2.5, None])  # for JSON has no such numbers
    old = {**figures, "loss": math.nan}
    well = {**figures, "loss": 2.0}
    for results, said in (([figures], "10.00 diverged"), ([well, old, well], "10.00 ± 0.00 1 of 3 diverged")):
        records = [record(replace(cell, seed=seed), **result) for seed, result in enumerate(results)]
        (table,) = tables(records)
        shown = {name: value.text for name, value in table.lines[0].values.items()}
        assert shown["quality %"] == said
        assert shown["ms a step"].partition(" ± ")[0] == "12350"
        assert shown["kB a step"] == "123500"
        assert list(compare.changes(records, records, 0.0)) == []


def changed(
    before: Sequence[Record], after: Sequence[Record], *, beyond: bool = True
) -> list[tuple[str, str, float, bool]]:
    found = compare.changes(before, after, 0.05)
    return [(c.cell.kind, c.measure, round(c.share, 2), c.better) for c in found if c.beyond == beyond]


def test_what_changed_is_told_and_chance_is_not() -> None:
    before = of_every_kind()
    assert list(compare.changes(before, before, 0.0)) == []
    after = []
    for each in before:
        result = dict(each.result)
        if each.cell.kind == "train" and each.cell.workload == "image" and each.cell.method == "ddp":
            result["step_seconds"] = [2 * result["step_seconds"][0]]
        elif each.cell.kind == "sync":
            result["seconds"] = [1.01 * result["seconds"][0]]
        elif each.cell.kind == "codec":
            result["error"] = 0.4
        elif each.cell.kind == "train" and each.cell.method == "torch-fp16":
            result["interface_bytes"] *= 1.002  # headers of what was sent again
        after.append(dataclasses.replace(each, result=result))
    assert changed(before, after) == [("train", "seconds", 1.0, False), *[("codec", "error", -0.2, True)] * 2]
    assert sorted(each[1] for each in changed(before, after, beyond=False)) == ["bytes", *["seconds"] * 8]
    lost, new = compare.lost_and_found(before, after[:3])
    assert len(lost) == len([each for each in before if not each.error]) - 3
    assert new == []


def test_times_are_held_against_how_steps_differ_and_quality_against_how_seeds_do() -> None:
    def timed(seconds: Sequence[float]) -> list[Record]:
        return [record(Cell("sync", "tiny", "topk"), seconds=list(seconds))]

    steady, restless = [1.0, 1.01, 0.99, 1.0, 1.02], [1.0, 1.3, 0.8, 1.5, 0.9]
    assert changed(timed(steady), timed([1.1 * each for each in steady])) == [("sync", "seconds", 0.1, False)]
    assert changed(timed(restless), timed([1.1 * each for each in restless])) == []
    qualities = [0.80, 0.84, 0.82]
    before = [trial("topk", quality, seed) for seed, quality in enumerate(qualities)]
    worse = [trial("topk", quality - 0.01 - 0.001 * seed, seed) for seed, quality in enumerate(qualities)]
    other = [trial("topk", quality, seed) for seed, quality in enumerate((0.81, 0.82, 0.83))]
    assert [each[1] for each in changed(before, worse)] == ["quality", "loss"]
    assert changed(before, other) == []
    assert changed(before[:2], worse[:2]) == []  # two seeds say nothing of chance


def test_the_page_of_a_paper_has_every_claim_with_its_verdict() -> None:
    plan: Plan = load("papers", "layerwise")
    records = [
        trial(cell.method, 0.8 + 0.01 * (cell.granularity == "layer") + 0.001 * cell.seed, **_axes(cell))
        for cell in plan.cells
    ]
    found = reproduction.findings(plan, records)
    text = reproduction.page(plan, records, found, "gradwire reproduce layerwise")
    verdicts = {each.claim.text: each.verdict for each in found}
    assert verdicts["TernGrad: layer-wise is better than entire-model"] == "holds"
    assert verdicts["Top-k at 10 % and less, plain SGD: entire-model is better"] == "does not hold"
    assert verdicts["Threshold-v: both are equal"] == "does not hold"
    for each in found:
        assert f"| {each.claim.text} | {each.claim.published} |" in text
        assert f"| **{each.verdict}** |" in text
        assert (f"* {each.claim.text}: {each.verdict}. " in text) == (each.verdict != "holds")
        assert (each.claim.reason in text) == (each.verdict != "holds" or not each.claim.reason)
    assert all(what in text and why in text for what, why in plan.scaled)
    assert f"{len(records)} of {len(plan.cells)} cells" in text


def _axes(cell: Cell) -> dict[str, Any]:
    return {name: value for name, value in cell.setting("kind", "method")}


def test_longer_trainings_stand_on_the_page_as_they_stand_where_they_are_told_of() -> None:
    plan = load("papers", "pqasgd")
    published = (DOCS / "reproductions" / "pqasgd.md").read_text()
    assert plan.elsewhere in published
    assert plan.elsewhere in reproduction.page(plan, [], reproduction.findings(plan, []), "gradwire reproduce pqasgd")
    told = (DOCS / "periodic.md").read_text().splitlines()
    rows = [line for line in plan.elsewhere.splitlines() if line.startswith(("| PQASGD", "| every step"))]
    assert len(rows) == 20
    assert [row for row in rows if row not in told] == []
