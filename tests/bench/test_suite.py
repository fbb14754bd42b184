"""The suite: plans, records that a run goes on from, verdicts, the report and what changed between two runs."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gradwire import cli
from gradwire.errors import ConfigurationError
from gradwire_bench.cell import SCHEMA, Cell
from gradwire_bench.suite import compare
from gradwire_bench.suite.claims import Claim, judge, undecidable
from gradwire_bench.suite.ledger import FILE, Ledger, write
from gradwire_bench.suite.measures import MEASURES
from gradwire_bench.suite.plan import cells_of, load, papers, presets
from gradwire_bench.suite.run import Runner, heats, measure
from suite_records import record, trial


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


GRID = 'title = "A plan"\nabout = "None."\n[[grid]]\nkind = "codec"\nworkload = "image"\nmethod = "topk"\n'
CLAIM = '[[claim]]\ntext = "a"\nmeasure = "bits"\nrelation = "better"\n'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('title = "A plan"\nabout = "None."\ngrid = "topk"\n', "is no plan"),
        (GRID.replace('"None."', "3"), "is no plan"),
        (GRID.replace('"topk"', "3"), "is no plan"),
        (GRID.replace("None", "\xe9"), "is no plan"),  # in Latin-1
        (f'{GRID}{CLAIM}margin = "much"\n', "is no plan"),
        (f"{GRID}{CLAIM}where = {{net = 3}}\n", "a claim has no axis .'net'."),
        (f"{GRID}{CLAIM}margn = 3\n", "is no plan.*margn"),
        (GRID.replace("topk", "tpok"), "did you mean 'topk'"),
    ],
)
def test_a_file_that_is_no_plan_is_told_before_anything_is_measured(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(content, encoding="latin-1")
    with pytest.raises(ConfigurationError, match=said):
        load("papers", str(tmp_path / "plan.toml"))


def test_filters_leave_the_cells_that_have_all_of_them() -> None:
    plan = load("papers", "layerwise")
    chosen = plan.only(["workload=alexnet", "granularity=layer", "seed=0", "seed=1"])
    assert {(cell.workload, cell.granularity, cell.seed) for cell in chosen} == {
        ("alexnet", "layer", 0),
        ("alexnet", "layer", 1),
    }
    full = load("presets", "full")  # has cells that differ in nothing but that one leaves the granularity to its method
    for each, cell in ((plan, plan.cells[-1]), *((full, cell) for cell in full.cells if cell.method == "efsignsgd")):
        words = shlex.split(cell.command("gradwire reproduce layerwise"))
        assert words[:3] == ["gradwire", "reproduce", "layerwise"]
        assert each.only([word for word in words[3:] if word != "--only"]) == [cell]
    with pytest.raises(ConfigurationError, match="axis one of"):
        plan.only(["nets=alexnet"])
    with pytest.raises(ConfigurationError, match="'method': write axis=value"):
        plan.only(["method"])
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
    cut_off = path.read_text()
    ledger = Ledger(tmp_path)
    assert ledger.records() == [first]
    assert path.read_text() == cut_off  # who reads writes nothing
    ledger.add(second)
    assert Ledger(tmp_path).records() == [first, second]
    assert json.loads(path.read_text().splitlines()[0])["schema"] == SCHEMA
    path.write_text(path.read_text().replace("cell/1", "cell/9"))
    with pytest.raises(ConfigurationError, match="cell/9"):
        Ledger(tmp_path)
    for text, why in (
        ("{}", "lacks 'schema'"),
        ("[1]", "another form"),
        ('{"schema', "is no record"),
        ("\xff", "utf-8"),
    ):
        path.write_text(f"{text}\n", encoding="latin-1")
        with pytest.raises(ConfigurationError, match=f"{why}.*; choose another folder"):
            Ledger(tmp_path)
    for name, made in (("none", "suite --out"), ("none.jsonl", "codecs --json")):
        with pytest.raises(ConfigurationError, match=f"make it with gradwire bench .*{made} .*{name}"):
            Ledger.read(tmp_path / name)
    for name in ("train.jsonl", "train.json"):
        write(tmp_path / "new" / name, [first, second])
        assert Ledger.read(tmp_path / "new" / name).records() == [first, second]


@pytest.mark.usefixtures("begun_quickly")
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


@pytest.mark.parametrize("words", [["bench", "suite", "--preset", "small"], ["reproduce", "layerwise"]], ids=str)
def test_commands_of_cells_have_what_their_figures_depend_on(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of one's own, from here, and the images; each else it would measure others, or none."""
    begun: list[str] = []
    monkeypatch.setattr(Runner, "run", lambda self, *_: begun.append(self.command))
    monkeypatch.setattr("gradwire_bench.suite.estimate.seconds", lambda *_: 1.0)
    monkeypatch.setenv("GRADWIRE_IMPORT", "")
    monkeypatch.chdir(tmp_path)
    Path("my methods.py").write_text("", encoding="utf-8")
    typed = [*words, "--import", "my methods.py", "--dataset", "digits"]
    monkeypatch.setattr(sys, "argv", ["gradwire", *typed, "--out", "there"])
    cli.main()
    assert [shlex.split(each) for each in begun] == [["gradwire", *typed]]
