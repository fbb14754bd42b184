"""``gradwire simulate`` and ``gradwire advise``, as a user runs them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from gradwire import cli, units
from gradwire.cost import user
from gradwire.cost.advice import METHODS, Candidate, advise, candidates
from gradwire.cost.clock import Clock, Cost
from gradwire.cost.costs import Profile, profile
from gradwire.cost.periodic import spread_out
from gradwire.cost.scene import Scene
from gradwire.cost.simulation import plain, simulate
from gradwire.cost.workload import bucketed
from gradwire.engine.automatic import AMONG
from gradwire.errors import ConfigurationError
from gradwire_bench import closed_forms

GIVEN = {"--shapes": "tiny", "--workers": "4", "--device": "h200", "--step-time": "0.001"}
SMALL = [word for pair in GIVEN.items() for word in pair]


def run(*arguments: str, monkeypatch, capsys) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["gradwire", *arguments])
    monkeypatch.setenv("COLUMNS", "160")  # or long figures would leave no room for names
    code = cli.main()
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_simulate_has_a_row_for_each_method_and_writes_all(tmp_path: Path, monkeypatch, capsys) -> None:
    path = tmp_path / "told.json"
    arguments = ["simulate", "acpsgd:rank=2", "topk:ratio=0.1", *SMALL, "--json", str(path)]
    code, out, _ = run(*arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0
    assert "acpsgd:rank=2" in out
    document = json.loads(path.read_text())
    assert document["schema"] == "gradwire.simulate/1"
    assert [row["label"] for row in document["predictions"]] == ["DDP fp32", "acpsgd:rank=2", "topk:ratio=0.1"]
    assert all(row["seconds"] >= 0.001 for row in document["predictions"])


def test_what_was_named_is_shown_also_if_it_is_not_the_fastest_way(monkeypatch, capsys) -> None:
    given = ["--method", "qsgd:bits=4", "--method", "qsgd:bits=4,inside=4", "--workers", "8", "--gpus", "4"]
    for command in ("simulate", "advise"):
        code, out, _ = run(command, *given, "--shapes", "tiny", monkeypatch=monkeypatch, capsys=capsys)
        assert code == 0
        assert "│ qsgd:bits=4 " in out
        assert "│ qsgd:bits=4, inside=4 " in out
    code, out, _ = run("simulate", "qsgd", "--every", "4", monkeypatch=monkeypatch, capsys=capsys)
    assert "│ qsgd, every 4 " in out


def test_times_of_other_options_are_marked(monkeypatch, capsys) -> None:
    code, out, _ = run("simulate", "powersgd", "powersgd:rank=32", *SMALL[2:], monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0
    marked = [line.split()[1] for line in out.splitlines() if line.startswith("│") and line.rstrip(" │").endswith("*")]
    assert marked == ["powersgd:rank=32"]
    assert "* as it takes with other options, granularity or route" in " ".join(out.split())


def test_what_a_step_takes_that_averages_nothing_has_copies_into_buckets_in_it(monkeypatch, capsys) -> None:
    given = ("simulate", "bf16", "--shapes", "resnet50", "--workers", "4")
    for step, took in (("0", "15.52"), ("0.3", "315.5")):
        code, out, _ = run(*given, "--step-time", step, monkeypatch=monkeypatch, capsys=capsys)
        assert code == 0
        said = " ".join(out.split())
        assert f"a step that averages nothing: {took} ms, with DDP's copies into its buckets; of" in said


def test_advise_gives_a_line_that_can_be_pasted(monkeypatch, capsys) -> None:
    arguments = ["--shapes", "resnet18", "--device", "h200", "--step-time", "0.02"]
    tried = ["--method", "bf16", "--method", "acpsgd:rank=4", "--link"]
    code, out, _ = run("advise", *arguments, *tried, "1gbit", monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0
    assert 'handle = gradwire.compress(model, "acpsgd", rank=4)' in out
    code, out, _ = run("advise", *arguments, *tried, "400gbit", monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0
    assert "Stay with" in out
    assert "not measured" in " ".join(out.split())


def test_what_was_not_measured_to_keep_the_accuracy_is_recommended_if_it_is_named(monkeypatch, capsys) -> None:
    given = ["advise", "--shapes", "resnet50", "--step-time", "0.3", "--link", "100mbit"]
    quick = "randomk:ratio=0.01,granularity=bucket"
    code, out, _ = run(*given, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0
    assert "compress(model, 'randomk'" not in out.replace('"', "'")
    assert f"{quick} would take" in " ".join(out.split())
    code, out, _ = run(*given, "--method", "bf16", "--method", quick, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0
    assert 'compress(model, "randomk", ratio=0.01' in out
    assert "would take" not in out


def test_what_may_be_recommended_is_what_auto_chooses_among() -> None:
    eligible = [each for each in candidates() if each.eligible]
    assert {each.name for each in eligible} == {"bf16", *(line.partition(":")[0] for line in AMONG)}
    assert {"deadzone:bits=0.1", "deadzone:bits=0.1,granularity=bucket"} <= {each.label for each in eligible}
    assert "deadzone:bits=0.1,granularity=layer" not in {each.label for each in eligible}


def test_every_method_is_tried_of_which_there_are_times(monkeypatch, capsys) -> None:
    """None of a codec whose thread waits for the GPU is computed."""
    code, out, _ = run("advise", "--shapes", "tiny", "--device", "h200", monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0
    assert "without subspace and deadzone, of which it has no times" in " ".join(out.split())
    code, out, _ = run("advise", "--shapes", "tiny", monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0
    assert "without" not in out
    assert all(name in out for name, _ in METHODS)
    assert {"subspace", "deadzone"} < {name for name, _ in METHODS}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--link", "10 gb/s"], "did you mean 10gbit (or 80gbit, if these are bytes)?"),
        (["--link", "0"], "link='0' is not a rate: write a number"),
        (["--link", "10GB/s"], "a byte is 8 bits: did you mean 80gbit?"),
        (["--link", "fast"], "write a number and one of bit, kbit, mbit or gbit"),
        (["--latency", "50"], "did you mean 50us or 50ms?"),
        (["--shapes", "resnet51"], "did you mean 'resnet50'"),
        (["--shapes", "nowhere.py:make"], "there is no file nowhere.py"),
        (["--step-time", "fast"], "give the seconds of a step on one worker"),
        (["--step-time", "-1"], "give seconds of 0 or more"),
        (["--workers", "6", "--gpus", "4"], "give a multiple of 4"),
        (["--workers", "10001"], "workers=10001 is out of range; give 1 to 10000"),
        (["--workers", "4", "--lost", "4"], "lost=4 of 4 workers: give so few that some are left"),
        (["--device", "h100"], "did you mean"),
        (["--every", "4", "--delay", "4"], "a delay of 0 to 3 steps"),
        (["--fragments", "4"], "with every=1: give 1 to 1 fragments"),
        (["--delay", "3"], "with every=1: give 1 to 1 fragments and a delay of 0 to 0 steps"),
        (["--slowest", "inf"], "--slowest"),
        (["--every", "8", "--plot", "steps.png"], "--plot draws averages of gradients"),
        (["--plot", "steps.foo"], "Its name must end in .png, .svg or .pdf"),
        (["--plot", "steps"], "Its name must end in .png, .svg or .pdf"),
        (["tpok"], "did you mean"),
        (["--fragments", "4"], "or a larger every"),
        (["--near", "10gbit"], "near='10gbit' is within nodes of several workers; give gpus, too"),
        (["--far", "2gbit"], "far='2gbit', 30ms is between sites; give sites, too"),
        (["--far-latency", "1ms"], "far='1gbit', 1ms is between sites; give sites, too"),
        (["ddp:bucket_mb=1"], "'ddp:bucket_mb=1': DDP is simulated with its usual buckets; leave its options out"),
        (["resnet50"], "'resnet50' is a model and no method; write it as --shapes resnet50"),
        (["train.py:make"], "'train.py:make' is a model and no method; write it as --shapes train.py:make"),
        (["recipe:sgd"], "names a recipe; write its line, which gradwire recipes shows"),
        (["topk:ratio=1%"], "ratio='1%' is not possible; choose a number"),
        (["powersgd:warm=yes"], "'powersgd' has no option 'warm'; its options: rank, bits"),
    ],
)
def test_bad_input_gets_a_plain_sentence(arguments: list[str], said: str, monkeypatch, capsys) -> None:
    others = [word for name, value in GIVEN.items() if name not in arguments for word in (name, value)]
    code, _, error = run("simulate", *others, *arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 2
    assert said in " ".join(error.split())
    assert "Traceback" not in error


def test_a_model_of_ones_own(tmp_path: Path, monkeypatch, capsys) -> None:
    path = tmp_path / "own_model_of_a_test.py"
    path.write_text(
        "from torch import nn\ndef make():\n    return nn.Linear(200, 300)\ndef other():\n    return 3\n"
        "def lazy():\n    return nn.LazyLinear(300)\n"
        "def table():\n    return nn.Sequential(nn.Embedding(90, 4, sparse=True))\n"
    )
    given = ["simulate", "bf16", *SMALL[2:], "--shapes"]
    code, out, _ = run(*given, f"{path}:make", monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0
    assert "0.0603 M parameters" in " ".join(out.split())
    code, _, error = run(*given, f"{path}:other", monkeypatch=monkeypatch, capsys=capsys)
    assert code == 2
    assert "must return a torch.nn.Module" in " ".join(error.split())
    code, _, error = run(*given, f"{path}:lazy", monkeypatch=monkeypatch, capsys=capsys)
    assert code == 2
    assert "has parameters without a shape, such as 'weight'; run a batch through" in " ".join(error.split())
    code, _, error = run(*given, f"{path}:table", monkeypatch=monkeypatch, capsys=capsys)
    assert code == 2
    assert "0 has sparse=True; gradwire averages dense gradients only" in " ".join(error.split())


@pytest.mark.parametrize(("dtype", "nbytes"), [("float32", 4), ("bfloat16", 2), ("float64", 8)])
def test_ddp_sends_gradients_in_the_type_that_a_model_has(dtype: str, nbytes: int) -> None:
    model = user.model("mine", nn.Linear(3000, 5000).to(getattr(torch, dtype)))
    setting = Scene(workers=4).setting(model)
    row = plain(setting)
    assert row.wire_bytes == 2 * 3 * nbytes * model.numel // 4
    assert row.label == f"DDP {dict(float32='fp32', bfloat16='bf16', float64='fp64')[dtype]}"
    assert spread_out(None, setting, 4).wire_bytes == row.wire_bytes / 4
    halved = Candidate.make("bf16", {})
    assert simulate(halved.configuration, setting).wire_bytes == 2 * 3 * 2 * model.numel // 4
    first, *others = bucketed([(str(number), (1 << 20,)) for number in range(30)], nbytes)
    assert len(first) == 1
    assert {len(each) for each in others[:-1]} == {-(-25 // nbytes)}


def test_how_much_is_fused_is_simulated_too() -> None:
    fused = Candidate.make("topk", {"fuse_bytes": 1 << 22})
    assert fused.configuration.fuse_bytes == 1 << 22
    assert fused.line == 'handle = gradwire.compress(model, "topk", fuse_bytes=4194304)'


@pytest.mark.parametrize("bits", [1e5, 2.5e6, 1e9, 4e11])
def test_rates_are_read_as_they_are_written(bits: float) -> None:
    assert units.rate(units.written(bits)) == bits


@pytest.mark.parametrize(
    ("value", "text"), [(96_231.4, "96230"), (1e9, "1000000000"), (435.04, "435"), (0.0019, "0.0019")]
)
def test_large_numbers_are_rounded_and_have_no_exponent(value: float, text: str) -> None:
    assert units.rounded(value, 4) == text


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    known = profile("xeon")
    known.write(tmp_path / "new" / "here.json")
    again = profile(str(tmp_path / "new" / "here.json"))
    assert again == known
    assert known.origin == "measured"
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="is no profile"):
        Profile.read(tmp_path / "broken.json")


def test_nothing_is_recommended_above_the_rate_at_which_halves_hide() -> None:
    """As in closed form: above it the best dense average adds next to nothing to a step."""
    scene = Scene("resnet50", 8, "10gbit", "5us", "0.06", "h200")
    model = scene.model()
    edge = closed_forms.hiding_rate(2 * model.numel, 8, 0.04)
    tried = [Candidate.make("bf16", {}), Candidate.make("acpsgd", {"rank": 4})]
    above = advise(scene.setting(model, 3 * edge), tried)
    assert above.reason.startswith("Stay with")
    below = advise(scene.setting(model, edge / 3), tried)
    assert below.chosen is tried[1]
    unknown = [tried[0], replace(tried[1], eligible=False)]
    stays = advise(scene.setting(model, edge / 3), unknown)
    assert stays.chosen is tried[0]
    assert stays.reason.startswith("Stay with bf16 DDP: no average that was measured to keep the accuracy is surely")
    assert "acpsgd:rank=4 would take" in stays.reason


def test_nodes_that_share_a_link_pay_for_what_goes_from_each_to_each() -> None:
    """A ring crosses a node's link once; what eight GPUs send to everybody crosses it eight times."""
    flat = Scene("resnet18", 64, "10gbit", "5us", "0", "h200").setting()
    nodes = Scene("resnet18", 64, "10gbit", "5us", "0", "h200", gpus=8).setting()
    assert nodes.network.cost("all-reduce", 1 << 20).seconds == flat.network.cost("all-reduce", 1 << 20).seconds
    dearer = nodes.network.cost("all-to-all", 1 << 20).seconds / flat.network.cost("all-to-all", 1 << 20).seconds
    assert dearer == pytest.approx(8 * 56 / 63, rel=0.1)


def test_two_levels_save_what_nodes_send_from_each_to_each() -> None:
    """What crosses a link is what one worker sends, not eight; a world that is no such grid is refused."""
    nodes = Scene("resnet18", 16, "1gbit", "5us", "0", "h200", gpus=8).setting()
    arguments = {"bits": 4, "route": "sharded"}
    flat, shared = (Candidate.make("qsgd", arguments | inside) for inside in ({}, {"inside": 8}))
    alone, together = simulate(flat.configuration, nodes), simulate(shared.configuration, nodes)
    assert together.wire_bytes == pytest.approx(alone.wire_bytes / 8 * (1 / 2) / (15 / 16), rel=0.1)
    assert alone.seconds / together.seconds == pytest.approx(8, rel=0.15)
    assert [each.label for each in candidates(8)].count("topk:ratio=0.01,inside=8") == 1
    assert not [each for each in candidates() if "inside" in each.arguments]
    with pytest.raises(ConfigurationError, match="inside=4: the network of 16 workers is not one of 4 nodes of 4"):
        simulate(Candidate.make("topk", {"inside": 4}).configuration, nodes)


def test_a_network_and_a_node_s_links_carry_at_the_same_time() -> None:
    clock = Clock()
    far, near = clock.send(Cost(2.0), (0, 0)), clock.send(Cost(1.5), (1, 0), "node")
    behind = clock.send(Cost(1.0), (2, 0))
    clock.until_there(near)
    assert clock.now == 1.5
    clock.until_there(behind)
    assert clock.now == 3.0
    assert far.left == 0


def test_periodic_averages_cost_their_share_and_a_delay_hides_them() -> None:
    setting = Scene("resnet18", 8, "1gbit", "50us", "0.1", "xeon", sites=2, far="100mbit").setting()
    every = plain(setting).exposed
    now_and_then = spread_out(None, setting, 10)
    assert 0 < now_and_then.exposed < every
    assert spread_out(None, setting, 1000).exposed == pytest.approx(now_and_then.exposed / 100)
    streaming = spread_out(None, setting, 10, fragments=5, delay=2)
    assert streaming.exposed < now_and_then.exposed
    compressed = spread_out(Candidate.make("efsignsgd", {}), setting, 10)
    assert compressed.wire_bytes < now_and_then.wire_bytes / 20


def test_lost_workers_and_slow_ones() -> None:
    whole = Scene("resnet18", 8, "1gbit", "50us", "0.1", "xeon")
    made = Candidate.make("acpsgd", {}).configuration
    lost = Scene("resnet18", 8, "1gbit", "50us", "0.1", "xeon", lost=4)
    assert simulate(made, lost.setting()).wire_bytes < simulate(made, whole.setting()).wire_bytes
    slow = Scene("resnet18", 8, "1gbit", "50us", "0.1", "xeon", slowest=2.0)
    assert simulate(made, slow.setting()).seconds > simulate(made, whole.setting()).seconds + 0.09
