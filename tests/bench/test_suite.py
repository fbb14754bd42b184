"""The suite: plans, records that a run goes on from, verdicts, the report and what changed between two runs."""

import dataclasses
import json
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from gradwire.errors import ConfigurationError
from gradwire_bench import report
from gradwire_bench.suite import compare, page, reproduction
from gradwire_bench.suite.cell import SCHEMA, Cell, Record
from gradwire_bench.suite.claims import Claim, judge, undecidable
from gradwire_bench.suite.ledger import FILE, Ledger, write
from gradwire_bench.suite.measures import MEASURES
from gradwire_bench.suite.plan import Plan, cells_of, load, papers, presets
from gradwire_bench.suite.run import Runner, heats, measure
from gradwire_bench.suite.tables import tables

MACHINE = report.machine()
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def record(cell: Cell, why: str | None = None, **result: Any) -> Record:
    return Record(cell, result, 1.0, cell.command("gradwire bench suite"), "2026-11-23T00:00:00+00:00", MACHINE, why)


def trial(method: str, quality: float, seed: int = 0, **axes: Any) -> Record:
    sent = 100.0 if method == "ddp" else 10.0
    figures: dict[str, Any] = {"accuracy": quality, "loss": 1 - quality, "sent_bytes": sent, "dense_bytes": 100.0}
    return record(Cell("trial", axes.pop("workload", "alexnet"), method, seed=seed, **axes), **figures)


def of_every_kind() -> list[Record]:
    phases = {"forward": 0.01, "backward": 0.02, "update": 0.001, "encode": 0.002, "wire": 0.003, "decode": 0.001}
    found = []
    for number, method in enumerate(("ddp", "topk:ratio=0.01", "acpsgd:rank=4", "torch-fp16"), start=1):
        for seed in (0, 1):
            found.append(trial(method, 0.9 - 0.01 * number + 0.001 * seed, seed))
        metered = None if method in ("ddp", "torch-fp16") else 50.0
        figures: dict[str, Any] = {"metered_bytes": metered, "interface_bytes": 60.0, "dense_bytes": 100.0}
        curve = [{"step": step, "seconds": 0.1 * step, "accuracy": 0.08 * step} for step in range(1, 6)]
        found.append(
            record(
                Cell("train", "image", method, link="100mbit"),
                **figures,
                accuracy=0.8,
                step_seconds=[0.1 * number],
                phases={name: number * seconds for name, seconds in phases.items()},
                peak_bytes=3 * 10**8,
                curve=curve,
                target_accuracy=0.3,
                seconds_to_target=None,
            )
        )
        for link in ("1gbit", "100mbit"):
            cell = Cell("sync", "resnet50", method, link=link)
            found.append(record(cell, **figures, seconds=[0.1 * number], stages={"wire": 0.1}))
        if method.startswith("topk"):
            for scope in ("layer", "model"):
                cell = Cell("codec", "image", method, granularity=scope)
                found.append(record(cell, bits=0.4, error=0.5))
    return [*found, record(Cell("train", "ncf", "ddp"), why="ConfigurationError: MovieLens-100k <is> not there")]


@pytest.mark.parametrize(("kind", "name"), [*(("presets", n) for n in presets()), *(("papers", n) for n in papers())])
def test_plans_of_ours_are_whole(kind: str, name: str) -> None:
    plan = load(kind, name)
    assert plan.cells
    assert plan.title
    assert not undecidable(plan.claims, plan.cells)
    if kind == "papers":
        assert plan.claims
        assert plan.scaled
        assert {cell.seed for cell in plan.cells} == {0, 1, 2}
        assert "arXiv" in plan.about or "NeurIPS" in plan.about
    else:
        assert {"ddp", "bf16", "torch-fp16", "torch-powersgd:rank=4"} <= {
            c.method for c in plan.cells if c.kind == "train"
        }


def test_the_seed_is_outermost_and_a_slip_of_the_pen_is_found() -> None:
    cells = cells_of({"kind": "trial", "workload": "alexnet", "method": ["ddp", "topk"], "seed": [0, 1]})
    assert [(cell.seed, cell.method) for cell in cells] == [(0, "ddp"), (0, "topk"), (1, "ddp"), (1, "topk")]
    for wrong, said in (
        ({"workloads": "alexnet"}, "no axis"),
        ({"workload": "alexnett"}, "alexnet"),
        ({"method": "topp"}, "topk"),
        ({"optimizer": "adam"}, "adamw"),
        ({"link": "fast"}, "fast"),
        ({"steps": -1}, "steps=-1"),
        ({"rate": 0}, "rate=0"),
        ({"kind": "race"}, "kind='race'"),
        ({"kind": "kernel", "workload": "one"}, "such as one:25000000"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            cells_of({"kind": "trial", "workload": "alexnet", "method": "topk", **wrong})


def test_filters_leave_the_cells_that_have_all_of_them() -> None:
    plan = load("papers", "layerwise")
    chosen = plan.only(["workload=alexnet", "granularity=layer", "seed=0", "seed=1"])
    assert {(cell.workload, cell.granularity, cell.seed) for cell in chosen} == {
        ("alexnet", "layer", 0),
        ("alexnet", "layer", 1),
    }
    cell = plan.cells[-1]
    words = shlex.split(cell.command("gradwire reproduce layerwise"))
    assert words[:3] == ["gradwire", "reproduce", "layerwise"]
    assert plan.only([word for word in words[3:] if word != "--only"]) == [cell]
    with pytest.raises(ConfigurationError, match="axis one of"):
        plan.only(["nets=alexnet"])
    with pytest.raises(ConfigurationError, match="no cell of layerwise has workload=gpt"):
        plan.only(["workload=gpt"])


def claim(relation: str, margin: float = 0.0, measure: str = "quality") -> Claim:
    sides = {"first": {"method": "topk"}, "second": {"method": "ddp"}}
    return Claim.of({"text": "a", "measure": measure, "relation": relation, "margin": margin, **sides})


@pytest.mark.parametrize(
    ("relation", "margin", "differences", "verdict"),
    [
        ("better", 0.0, (0.02, 0.021, 0.019), "holds"),
        ("better", 0.0, (-0.02, -0.021, -0.019), "does not hold"),
        ("better", 0.0, (-0.02, 0.021, 0.019), "cannot tell"),
        ("better", 0.0, (0.02, 0.021), "cannot tell"),
        ("better", 0.0, (0.0, 0.0, 0.0), "cannot tell"),
        ("equal", 0.5, (0.001, -0.001, 0.0), "holds"),
        ("equal", 0.5, (0.02, 0.021, 0.019), "does not hold"),
        ("equal", 0.5, (0.01, -0.01, 0.02), "cannot tell"),
        ("times", 1.001, (0.02, 0.021, 0.019), "holds"),
        ("times", 1.2, (0.02, 0.021, 0.019), "does not hold"),
    ],
)
def test_verdicts_go_by_the_interval_of_paired_differences(
    relation: str, margin: float, differences: Sequence[float], verdict: str
) -> None:
    levels = (0.5, 0.7, 0.9)  # seeds differ by far more than methods, which pairs do not mind
    records = [trial("ddp", level, seed) for seed, level in enumerate(levels)]
    records += [trial("topk", levels[seed] + each, seed) for seed, each in enumerate(differences)]
    found = judge(claim(relation, margin), records)
    assert found.verdict == verdict
    assert found.pairs == len(differences)
    if relation == "better":
        opposite = {"holds": "does not hold", "does not hold": "holds", "cannot tell": "cannot tell"}
        assert judge(claim(relation, margin, "loss"), records).verdict == verdict  # less of it is better
        swapped = dataclasses.replace(claim(relation), first={"method": "ddp"}, second={"method": "topk"})
        assert judge(swapped, records).verdict == opposite[verdict]


def test_a_factor_of_times_goes_the_right_way() -> None:
    records = []
    for seed in range(3):
        for method, seconds in (("ddp", 4.0), ("topk", 1.0 + 0.01 * seed)):
            records.append(record(Cell("sync", "tiny", method, seed=seed), seconds=[seconds]))
    assert judge(claim("times", 3.5, "seconds"), records).verdict == "holds"
    assert judge(claim("times", 4.5, "seconds"), records).verdict == "does not hold"


def test_methods_that_change_places_are_found_and_others_are_not() -> None:
    reversal = Claim.of({"text": "a", "measure": "quality", "relation": "reversal"})
    same = [
        trial(method, quality + 0.001 * seed, seed, workload=workload)
        for workload in ("alexnet", "lstm")
        for method, quality in (("topk", 0.9), ("qsgd", 0.8))
        for seed in range(3)
    ]
    assert judge(reversal, same).verdict == "does not hold"
    turned = [
        trial(each.cell.method, 1.7 - each.result["accuracy"], each.cell.seed, workload="lstm")
        if each.cell.workload == "lstm"
        else each
        for each in same
    ]
    assert judge(reversal, turned).verdict == "holds"
    assert judge(reversal, same[:2]).verdict == "cannot tell"
    assert judge(reversal, [*same[:6], trial("topk", 0.8, workload="lstm")]).verdict == "cannot tell"


def test_a_ledger_keeps_what_was_measured_and_forgets_a_line_cut_off(tmp_path: Path) -> None:
    first, second = trial("ddp", 0.9), record(Cell("trial", "ncf", "ddp"), why="no data")
    ledger = Ledger(tmp_path)
    ledger.add(first)
    ledger.add(second)
    again = Ledger(tmp_path)
    assert again.records() == [first, second]
    assert again.missing([first.cell, second.cell]) == [second.cell]  # what failed is tried again
    path = tmp_path / FILE
    path.write_text(path.read_text()[:-30])
    assert Ledger(tmp_path).records() == [first]
    ledger = Ledger(tmp_path)
    ledger.add(second)
    assert Ledger(tmp_path).records() == [first, second]
    assert json.loads(path.read_text().splitlines()[0])["schema"] == SCHEMA
    path.write_text(path.read_text().replace("cell/1", "cell/9"))
    with pytest.raises(ConfigurationError, match="cell/9"):
        Ledger(tmp_path)
    path.write_text("{}\n")
    with pytest.raises(ConfigurationError, match="lacks 'schema'"):
        Ledger(tmp_path)
    with pytest.raises(ConfigurationError, match="make it with gradwire bench suite"):
        Ledger.read(tmp_path / "none")
    write(tmp_path / "new" / "train.jsonl", [first, second])
    assert Ledger.read(tmp_path / "new" / "train.jsonl").records() == [first, second]


def test_a_run_goes_on_after_a_failure_and_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_CACHE", str(tmp_path))  # so that there is no MovieLens
    axes: dict[str, Any] = {"workers": 2, "steps": 2}
    cells = [
        Cell("trial", "ncf", "ddp", **axes),
        Cell("trial", "alexnet", "topk:ratio=0.1", **axes),
        Cell("codec", "image", "efsignsgd", "model", steps=1),
        Cell("kernel", "one:20000", "accumulate", workers=1, steps=2),
        *(Cell("sync", "tiny", method, **axes) for method in ("ddp", "acpsgd:rank=2")),
        *(Cell("train", "image", method, batch=8, **axes) for method in ("ddp", "efsignsgd")),
    ]
    told: list[int] = []
    ledger = Ledger(tmp_path / "out")
    Runner(ledger, "gradwire bench suite", "digits", 1).run(cells, lambda news, done: told.append(done))
    assert sum(told) == len(cells)
    failed, learnt, coded, timed, *raced = ledger.records(cells)
    assert failed.error is not None
    assert "MovieLens-100k is not in" in failed.error
    assert learnt.error is None
    assert 0 <= learnt.result["accuracy"] <= 1
    assert 0 < coded.result["bits"] < 2
    assert len(timed.result["seconds"]) == 2
    assert all(each.error is None and MEASURES["seconds"].of(each) for each in raced)
    assert raced[3].result["phases"].keys() == {"forward", "backward", "update", "encode", "wire", "decode"}
    dense, acpsgd = (MEASURES["fewer_bytes"].of(each) for each in raced[:2])
    assert dense == 1
    assert acpsgd is not None
    assert acpsgd > 10
    assert measure(cells[1], "digits")[0] == learnt.result
    races = [cell for cell in cells if cell.kind == "train"]
    Runner(Ledger(tmp_path / "again"), "gradwire bench suite", "digits", 1).run(races, lambda news, done: None)
    again = Ledger(tmp_path / "again").records(races)
    for one, other in zip(ledger.records(races), again, strict=True):  # the same seed, the same bits
        for name in ("losses", "metered_bytes", "parameters", "accuracy"):
            assert one.result[name] == other.result[name]
        assert len(one.result["parameters"]) == 16
    ends = [each.result["parameters"] for each in again]
    assert ends[0] != ends[1]
    assert compare.same_bits(ledger.records(races), again) == (2, 2)
    assert not [
        each for each in compare.changes(ledger.records(races), again, 0.0) if each.measure in ("loss", "bytes")
    ]
    lines = len((tmp_path / "out" / FILE).read_text().splitlines())
    Runner(Ledger(tmp_path / "out"), "gradwire bench suite", "digits", 1).run(cells[1:], lambda news, done: None)
    assert len((tmp_path / "out" / FILE).read_text().splitlines()) == lines  # nothing was measured again


def test_a_heat_is_of_cells_that_differ_in_method_alone() -> None:
    cells = [Cell("sync", "tiny", method, link=link) for link in ("none", "1gbit") for method in ("ddp", "topk")]
    assert [len(heat) for heat in heats(cells)] == [2, 2]


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
    assert len(html) < 5 * 2**20
    assert "About &lt;it&gt;." in html
    assert "MovieLens-100k &lt;is&gt; not there" in html
    for each in records:
        if not each.error:
            assert each.command in html
    assert page.html(records, "A title", "About <it>.") == html  # the same records, the same bytes


def test_the_report_of_some_kinds_has_their_parts_alone() -> None:
    html = page.html([trial("ddp", 0.9), trial("topk", 0.8)], "A title", "About.")
    assert Page(html).tags["svg"] == 1
    assert "Averages alone" not in html


def test_a_browser_shows_the_report(tmp_path: Path) -> None:
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is on this machine")
    (tmp_path / "report.html").write_text(page.html(of_every_kind(), "A title", "About."))
    shot = tmp_path / "shot.png"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,3000", f"--screenshot={shot}"]
    subprocess.run(
        [browser, *options, (tmp_path / "report.html").as_uri()], check=True, capture_output=True, timeout=120
    )
    from matplotlib.image import imread

    pixels = imread(shot)
    assert pixels.shape[:2] == (3000, 1400)
    rows = pixels[:, :, :3].reshape(30, -1, 3)
    assert sum(band.std() > 0.01 for band in rows) > 15  # there is something on most of it


def test_rows_are_over_seeds_and_hooks_without_a_meter_have_their_interface() -> None:
    training, learnt, averages, codecs = tables(of_every_kind())
    assert [len(table.lines) for table in (training, learnt, averages, codecs)] == [4, 4, 8, 2]
    assert [len(line.records) for line in learnt.lines] == [2] * 4
    texts = {line.values[2].text: [value.text for value in line.values] for line in training.lines}
    kilobytes = training.columns.index("kB a step")
    assert texts["DDP fp32"][kilobytes] == "0.1"
    assert texts["torch fp16_compress_hook"][kilobytes] == "0.06"
    assert texts["topk ratio=0.01"][kilobytes] == "0.05"
    points = {line.values[2].text: line.values[4].text for line in learnt.lines}
    assert points == {
        "DDP fp32": "+0.00",
        "topk ratio=0.01": "-1.00",
        "acpsgd rank=4": "-2.00",
        "torch fp16_compress_hook": "-3.00",
    }


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
