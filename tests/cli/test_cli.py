"""The command line, as a user runs it."""

import inspect
import io
import json
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from gradwire import cli, methods
from gradwire.cli import diagnosis
from gradwire.cli.lab import OPTIONS, lab
from gradwire.errors import ConfigurationError
from gradwire.kernels import dispatch
from gradwire.kernels.cpu import _compiled
from gradwire.lab import availability
from gradwire.methods.families import FAMILIES
from gradwire_bench import catalogue, handbook
from gradwire_bench.cell import Cell, Record
from gradwire_bench.suite import ledger
from gradwire_bench.terminal import bars


def run(*arguments, monkeypatch, capsys):
    """Runs a command in this process: exit code, standard output, standard error."""
    monkeypatch.setattr(sys, "argv", ["gradwire", *arguments])
    code = cli.main()
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ([], "doctor"),
        (["bench"], "kernels"),
        (["methods"], "gradwire methods --json methods.json"),
        (["check"], "gradwire check mine:rank=2 --import mine.py"),
        (["analyze"], "gradwire analyze topk:ratio=0.01 --owner qsgd:8"),
        (["bench", "sync"], "gradwire bench sync --link 1gbit"),
        (["bench", "train"], "gradwire bench train topk:ratio=0.001 acpsgd:rank=2"),
        (["bench", "periodic"], "gradwire bench periodic overhead"),
        (["bench", "validate"], "[default: 100mbit 300mbit 1gbit none]"),
        (["bench", "kernels"], "gradwire bench kernels"),
        (["bench", "codecs"], "gradwire bench codecs"),
        (["bench", "recipes"], "gradwire bench recipes --docs docs"),
        (["recipes"], "gradwire recipes --optimizer adamw --keeping"),
        (["bench", "gpu"], "gradwire bench gpu --json gpu.json"),
        (["bench", "suite"], "gradwire bench suite --preset small --out results/small"),
        (["bench", "compare"], "gradwire bench compare results/main results/branch"),
        (["reproduce"], "gradwire reproduce layerwise --docs docs/reproductions"),
        (["bench", "costs"], "gradwire bench costs here.json"),
        (["bench", "validate"], "gradwire bench validate --out docs/data"),
        (["simulate"], "gradwire simulate --shapes resnet50 --workers 16"),
        (["advise"], "gradwire advise --shapes resnet50 --step-time 0.3"),
        (["doctor"], "gradwire doctor"),
        (["lab"], "gradwire lab --sites 2 --between 100mbit --within 1gbit -- python"),
    ],
)
def test_help_has_examples(command, said, monkeypatch, capsys):
    code, out, _ = run(*command, "--help", monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0
    assert said in " ".join(out.split())


@pytest.mark.parametrize("width", [80, 100, 200])
def test_methods_has_a_line_for_each_method(width, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    path = tmp_path / "methods.json"
    code, out, _ = run("methods", "--json", str(path), monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0
    lines = out.partition("gradwire methods NAME")[0].splitlines()
    assert [line.split()[0] for line in lines[1:] if line.startswith("  ")] == [
        name for family in FAMILIES.values() for name in family
    ]
    assert all(len(line) <= width for line in lines)
    document = json.loads(path.read_text())
    assert document["schema"] == "gradwire.methods/1"
    listed = {entry["name"]: entry for entry in document["methods"]}
    assert listed["acpsgd"]["options"] == {"rank": 4, "bits": 32}
    assert all(entry["summary"] and entry["citation"] and entry["bits"] > 0 for entry in listed.values())
    assert document["measured"] == []


def test_every_method_has_a_family_the_one_of_the_readme():
    assert sorted(name for family in FAMILIES.values() for name in family) == sorted(methods.names())
    table = (Path(__file__).parents[2] / "README.md").read_text().partition("| family | methods |")[2]
    for family, names in FAMILIES.items():
        row = table.partition(f"| {family} |")[2].partition("\n")[0]
        assert re.findall("`(.*?)`", row) == list(names)


@pytest.mark.parametrize("name", methods.names())
def test_every_option_of_a_method_is_told_with_its_default(name):
    (entry,) = catalogue.entries([name])
    assert set(entry.option_texts) == set(entry.options)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(handbook.description(entry))
    told = " ".join(console.export_text().split())
    for option, default in entry.options.items():
        assert f"{option}={default!r} " in told
    assert entry.bias in told
    assert all(route in told for route in entry.routes)


def test_methods_writes_the_page_of_the_documentation(tmp_path, monkeypatch, capsys):
    results = tmp_path / "train.jsonl"
    found = {"ddp": 0.8, "topk:ratio=0.01": 0.79}
    ledger.write(results, [Record.now(Cell("train", "image", key), {"accuracy": found[key]}, 1, "") for key in found])
    arguments = ("methods", "topk", "qsgd", "--numel", "10000", "--docs", str(tmp_path), "--accuracy", str(results))
    code, out, _ = run(*arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0
    assert "enc GB/s" in out
    page = (tmp_path / "methods.md").read_text()
    assert "| `qsgd` |" in page
    assert "-1.0 (ratio=0.01) |" in page
    assert (tmp_path / "images" / "methods_size_error.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("begun_quickly")
def test_benches_write_records_that_compare_reads(tmp_path, monkeypatch, capsys):
    for kind, *arguments in (
        ("kernels", "--numel=20000", "--repeats=2"),
        ("codecs", "efsignsgd", "--workload=image", "--steps=1", "--dataset=digits"),
        ("sync", "topk", "--shapes=tiny", "--workers=2", "--link=none", "--steps=3"),
    ):
        path = tmp_path / f"{kind}.jsonl"
        code, _, err = run("bench", kind, *arguments, "--json", str(path), monkeypatch=monkeypatch, capsys=capsys)
        assert (code, err) == (0, "")
        records = ledger.Ledger.read(path).records()
        assert {f"{each.cell.kind}s" for each in records} == {kind if kind != "sync" else "syncs"}
        assert all(each.result and each.seconds > 0 for each in records)
        code, out, _ = run("bench", "compare", str(path), str(path), monkeypatch=monkeypatch, capsys=capsys)
        assert code == 0
        assert "Nothing changed beyond chance." in out


def test_analyze_prints_both_bounds(tmp_path, monkeypatch, capsys):
    path = tmp_path / "analysis.json"
    arguments = ("topk:ratio=0.01", "--owner=qsgd:8", "--steps=2", "--draws=2", "--dataset=digits")
    code, out, _ = run("analyze", *arguments, "--json", str(path), monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0
    assert "layer-wise" in out
    assert "entire model" in out
    (analysis,) = json.loads(path.read_text())["analyses"].values()
    assert analysis["layer_wise_bound"] <= analysis["entire_model_bound"]


def test_doctor_finds_torch_and_says_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GRADWIRE_CACHE", str(tmp_path))
    path = tmp_path / "doctor.json"
    code, out, _ = run("doctor", "--json", str(path), monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0
    findings = {finding["subject"]: finding for finding in json.loads(path.read_text())["findings"]}
    assert findings["torch"]["state"] == "ok"
    assert {"backends", "threads", "shaped network", "kernel cache", "Fashion-MNIST"} < set(findings)
    assert all(finding["remedy"] for finding in findings.values() if finding["state"] != "ok")
    assert "gloo" in out


def test_doctor_says_where_kernels_are_kept(tmp_path, monkeypatch):
    kept = Path(_compiled.largest_magnitude.stats.cache_path)
    found = {}
    for chosen in ("", str(kept.parent), str(tmp_path)):
        monkeypatch.setenv("NUMBA_CACHE_DIR", chosen)
        found[chosen] = next(each for each in diagnosis.examine() if each.subject == "kernel cache")
        assert str(kept) in found[chosen].found
    assert [each.state for each in found.values()] == ["ok", "ok", "limited"]
    assert found[str(tmp_path)].remedy == "set NUMBA_CACHE_DIR to a folder that can be written"


def test_kernels_that_cannot_be_compiled_are_told_once(tmp_path, monkeypatch, capsys):
    def overrides(device: str) -> None:
        raise ConfigurationError("no folder can be written; set NUMBA_CACHE_DIR to one that can")

    monkeypatch.setattr(dispatch, "overrides", overrides)
    path = tmp_path / "doctor.json"
    code, out, _ = run("doctor", "--json", str(path), monkeypatch=monkeypatch, capsys=capsys)
    assert (code, out.count("broken")) == (cli.USAGE_ERROR, 1)
    (broken,) = (each for each in json.loads(path.read_text())["findings"] if each["state"] == "broken")
    assert broken["subject"] == "kernel cache"
    assert broken["found"] == "no folder can be written"
    assert broken["remedy"] == "set NUMBA_CACHE_DIR to one that can"
    code, out, err = run("check", "topk", monkeypatch=monkeypatch, capsys=capsys)
    assert (code, "BROKEN" in out, err.count("set NUMBA_CACHE_DIR")) == (cli.USAGE_ERROR, False, 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bench", "sync", "--link", "fast"], "'fast'"),
        (["bench", "sync", "--shapes", "resnet51"], "resnet50"),
        (["bench", "sync", "--method", "topkk"], "topk"),
        (["bench", "sync", "--link", "1gbits"], "did you mean 1gbit"),
        (["analyze", "topkk"], "did you mean 'topk'"),
        (["analyze", "topk:ration=0.1"], "did you mean 'ratio'"),
        (["analyze", "topk:memroy=none"], "did you mean 'memory'"),
        (["analyze", "topk:memory=none"], "memory is chosen where a method is attached, and has no place here"),
        (["analyze", "topk:ratio=abc"], "ratio='abc'"),
        (["methods", "--measure", "--numel", "99999999999"], "--numel"),
        (["bench", "kernels", "--numel", "99999999999"], "--numel"),
        (["analize"], 'Did you mean "analyze"'),
        (["topk"], "gradwire methods topk"),
        (["doctor", "me"], "'me'"),
        (["methods", "--json", "/dev/null/all.json"], "/dev/null/all.json"),
        (["bench", "sync", "--method", "qsgd:bits=99"], "99"),
        (["bench", "sync", "--method", "topk:dense_below=few"], "below='few'"),
        (["bench", "sync", "--steps", "0"], "--steps"),
        (["bench", "sync", "--workers", "1.5"], "--workers: '1.5' is not a whole number"),
        (["bench", "sync", "--workers", "inf"], "--workers: 'inf' is not a whole number"),
        (["bench", "sync", "--workers", "many"], "--workers: 'many' is not a whole number"),
        (["bench", "kernels", "--numel", "1e999999999"], "--numel: '1e999999999' is not a whole number below"),
        (["bench", "validate", "--workers", "2.4"], "--workers"),
        (["bench", "train", "--seed", "0.5"], "--seed"),
        (["bench", "periodic", "--steps", "64.4"], "--steps"),
        (["bench", "kernels", "--numel", "1.5"], "--numel"),
        (["bench", "suite", "--jobs", "1.5"], "--jobs"),
        (["methods", "topkk", "--numel", "0"], "topk"),
        (["analyze", "--method", "topk:ratio=2"], "ratio=2"),
        (["methods", "--numel", "0", "--accuracy", "nowhere.json"], "nowhere.json"),
        (["bench", "train", "--dataset", "mnist"], "--dataset"),
        (["bench", "periodic", "--section", "speed"], "--section"),
        (["bench", "periodic", "--link", "fast"], "'fast'"),
        (["bench", "periodic", "--learning-rate", "0"], "learning-rate"),
        (["bench", "trian"], "trian"),
        (["lab", "--sites", "2", "--", "true"], "sites=2, between=None"),
        (["lab", "--within", "fast", "--", "true"], "'fast'"),
        (["lab"], "command"),
        (["bench", "costs", "/dev/null/costs.json"], "/dev/null cannot be written to"),
        (["check", "topk", "--json", "/"], "It is a folder; name a file"),
        (["bench", "train", "--out", "/dev/null/results"], "/dev/null cannot be written to"),
        (["frontier", "--picture", "/dev/null/all.png"], "/dev/null cannot be written to"),
        (["bench", "train", "--out", "/dev/null"], "It is a file; name a folder"),
        (["recipes", "--workload", "gpt", "--optimizer", "sgd"], "nothing was trained with workload gpt and optimizer"),
        (["simulate", "dion", "--shapes", "tiny"], "'gradwire bench costs FILE.json dion'"),
        (["advise", "--shapes", "math:", "--method", "topk"], "has no function ''; name one that it has"),
        (["advise", "--shapes", "no/train.py"], "'no/train.py' says no function; name the one that"),
        (["bench", "sync", "--lnk", "1gbit"], "--lnk"),
        (["bench", "costs"], "PATH is missing; gradwire bench costs --help"),
        (["bench", "gpu", "me"], "gradwire bench gpu --help says what has"),
        (["bench", "suite", "--preset", "smal"], "did you mean 'small'"),
    ],
)
def test_bad_options_are_one_clear_line_and_exit_code_2(arguments, said, monkeypatch, capsys):
    code, _, err = run(*arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert code == cli.USAGE_ERROR
    assert err.startswith("error: ")
    assert said in err
    assert len(err.splitlines()) == 1


def test_a_file_without_a_function_is_not_run_and_its_functions_are_named(tmp_path, monkeypatch, capsys):
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit(7)\ndef _help(): ...\ndef make_net(): ...\nclass Net: ...\n")
    code, _, err = run("advise", str(path), monkeypatch=monkeypatch, capsys=capsys)
    assert code == cli.USAGE_ERROR
    assert f"as in '{path}:make_net|Net'" in " ".join(err.split())


def test_what_others_said_is_no_markup(tmp_path, monkeypatch, capsys):
    """Names of files, and errors: gloo's begin with a path in brackets, which would end a style that never began."""
    path = tmp_path / "a[/b].json"
    code, out, _ = run("methods", "topk", "--json", str(path), monkeypatch=monkeypatch, capsys=capsys)
    assert (code, path.is_file()) == (0, True)
    assert f"Wrote {path}" in out
    said = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:1234"
    plan = tmp_path / "plan.toml"
    cell = 'kind = "codec"\nworkload = "image"\nmethod = "topk"\nsteps = 3\nworkers = 1\n'
    plan.write_text(f'title = "A plan"\nabout = "None."\n[[grid]]\n{cell}')
    record = Record.now(Cell("codec", "image", "topk", steps=3, workers=1), {}, 1, "", said)
    ledger.write(tmp_path / ledger.FILE, [record])
    given = ("reproduce", str(plan), "--out", str(tmp_path), "--report")
    code, out, _ = run(*given, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0
    assert said in " ".join(out.split())
    screen = io.StringIO()
    with bars(Console(file=screen, force_terminal=True, width=300)) as progress:
        progress.add_task("topk", news=said)
        progress.refresh()
    assert said in screen.getvalue()


def test_a_closed_standard_output_gets_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "argv", ["gradwire", "reproduce"])
    assert cli.main() == 0


def test_where_there_is_no_utf_8_it_goes_without(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr(sys, "argv", ["gradwire", "recipes", "--workload", "image", "--optimizer", "sgd"])
    assert cli.main() == 0
    sys.stdout.flush()
    assert "keeps" in written.getvalue().decode("ascii")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("bench validate tpok", "did you mean 'topk'"),
        ("bench validate torch-powersgd", "did you mean 'powersgd'"),
        ("bench validate --link none --link fast", "'fast'"),
        ("bench validate --link fast", "error: link='fast' is not a rate"),
        ("bench validate --workers 2 --workers 0", "--workers"),
        ("analyze auto", "'auto' is not known"),
        ("analyze topk --owner qsgd", "qsgd"),
    ],
)
def test_what_cannot_be_measured_is_told_before_anything_is(words, said, monkeypatch, capsys):
    for place in ("gradwire_bench.validate.measure", "gradwire_bench.gradients.real_gradients"):
        monkeypatch.setattr(place, lambda *given: pytest.fail("began to measure"))
    code, _, err = run(*words.split(), monkeypatch=monkeypatch, capsys=capsys)
    assert code == cli.USAGE_ERROR
    assert said in err


@pytest.mark.skipif(not availability().possible, reason=availability().reason)
def test_a_command_runs_in_a_lab(tmp_path, monkeypatch, capsys):
    path = tmp_path / "lab.json"
    words = ["lab", "--sites=2", "--between=100mbit", f"--json={path}", "--", "sh", "-c", "echo $RANK of $WORLD_SIZE"]
    code, out, _ = run(*words, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0
    assert [line for line in sorted(out.splitlines()) if " | " in line] == [f"{r} | {r} of 4" for r in range(4)]
    links = json.loads(path.read_text())["links"]
    assert [each["rate"] for each in links] == ["1gbit"] * 4 + ["100mbit"] * 2
    assert re.search(r"site 1, to others +│? *100mbit", out)


def test_a_lab_s_options_are_not_taken_for_its_command(monkeypatch, capsys):
    code, _, error = run("lab", "--betwen=1gbit", "--", "ls", monkeypatch=monkeypatch, capsys=capsys)
    assert code == 2
    assert "'--betwen=1gbit' is no option of gradwire lab; did you mean '--between'?" in " ".join(error.split())
    for words, said in (
        (("--sites=2", "--between=fast"), "between='fast' is not a rate"),
        (("--within=fast",), "error: within='fast' is not a rate"),
        (("--within=1gbit", "--sites=2"), "sites=2, between=None and a rate of '1gbit' for each worker do not go"),
    ):
        code, _, error = run("lab", *words, "--", "ls", monkeypatch=monkeypatch, capsys=capsys)
        assert code == 2
        assert said in " ".join(error.split())
    assert set(OPTIONS) == {f"--{each}" for each in inspect.signature(lab).parameters if each != "command"}
