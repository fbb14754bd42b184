"""The benchmark of periodic averaging, short: what its trainings, times and tables say."""

import json
import re

import pytest
import torch
from rich.console import Console

import gradwire
from gradwire.errors import ConfigurationError
from gradwire_bench import data, origin, periodic, periodic_plans, periodic_results, pictures, report
from gradwire_bench.launch import NO_LINK
from gradwire_bench.periodic_plans import CLAIM, FULL, SPEEDUP, VOLUME, Plan, Run
from gradwire_bench.periodic_report import Bench
from gradwire_bench.periodic_results import Outcome
from gradwire_bench.workloads import IMAGE, LANGUAGE

pytestmark = pytest.mark.usefixtures("begun_quickly")
DIGITS = data.DataSource(data.DIGITS, None, "for the test")
STEPS = 24


def test_trainings_of_all_kinds_send_what_their_plans_say(tmp_path):
    plans = [
        FULL,
        CLAIM[2],
        Plan("DiLoCo", 8, "qsgd:bits=4,owner=qsgd:4", outer_rate=0.7),
        Plan("SparseLoCo", 8, "topk:ratio=0.05,values=quantile:4", feedback=0.95),
        Plan("streaming", 8, fragments=2, delay=4),
        Plan("broken", 8, "topk:ratio=0.01", fragments=0),
    ]
    runs = [Run(plan, seed, STEPS, 0.05) for seed in (0, 1) for plan in (plans if seed == 0 else plans[:2])]
    seen = []
    outcomes = periodic.train(IMAGE, DIGITS, 2, NO_LINK, runs, on_progress=lambda so_far: seen.append(len(so_far)))
    assert seen
    rows = {row.label: row for row in periodic_results.summary(outcomes)}
    assert "fragments" in rows.pop("broken").error
    for row in rows.values():
        assert row.error is None
        assert row.seeds == (2 if row.label in (FULL.label, CLAIM[2].label) else 1)
        assert row.accuracy.mean > 0.3
    assert rows[FULL.label].loss.least < rows[FULL.label].loss.mean < rows[FULL.label].loss.most
    assert rows[FULL.label].share == pytest.approx(1, rel=0.01)
    # 4 bits every fourth step are 1/32; 1 % of the parameters go densely, each 512 values have a scale.
    assert rows[CLAIM[2].label].share == pytest.approx(4 / 32 / 4, rel=0.1)
    assert rows["DiLoCo"].share == pytest.approx(4 / 32 / 8, rel=0.1)
    assert rows["SparseLoCo"].share < rows["DiLoCo"].share
    # The model's last average is the one that ends the run, so both fragments go a little more than three times.
    assert rows["streaming"].share == pytest.approx(1 / 8, rel=0.5)
    assert rows[CLAIM[2].label].gap == pytest.approx(
        rows[CLAIM[2].label].loss.mean - rows[FULL.label].loss.mean, abs=1e-6
    )
    pictures.volume_plot(list(rows.values()), tmp_path / "new" / "volume.png", "a title", "a test")
    assert (tmp_path / "new" / "volume.png").read_bytes().startswith(b"\x89PNG")
    assert CLAIM[2].label in _text(report.periodic_table(list(rows.values()), "a title"))
    document = origin.document("bench.periodic", rows=list(rows.values()), outcomes=outcomes)
    assert json.loads(json.dumps(document))["outcomes"][0]["run"]["plan"]["label"] == FULL.label


def published_bins(chosen: torch.Tensor) -> torch.Tensor:
    """SparseLoCo's own 2 bits: four bins of 1.5 standard deviations around the mean, each read as its members' mean."""
    number = ((chosen - chosen.mean()) / (6 / 4 * chosen.std()) + 2).round().clamp(0, 3)
    return sum(chosen[number == bin].mean() * (number == bin) for bin in number.unique())


@pytest.mark.parametrize(
    "values", sorted({plan.method.split("values=")[1] for plan in VOLUME if "SparseLoCo" in plan.label})
)
@pytest.mark.parametrize("power", [1, 3], ids=["normal", "heavy tails"])
def test_two_bits_of_sparse_plans_lose_no_more_than_the_published_ones(values, power):
    vector = torch.randn(64, 4096, generator=torch.Generator().manual_seed(3)) ** power
    decoded = gradwire.roundtrip(vector, "topk", ratio=0.02, values=values, granularity="block:4096").decoded
    sent, chosen = decoded[decoded != 0], vector[decoded != 0]
    assert (sent - chosen).norm() <= (published_bins(chosen) - chosen).norm()


def test_learning_rate_goes_with_the_root_of_workers_over_steps():
    found = {
        (workers, run.steps): run.learning_rate
        for workers in periodic_plans.SPEEDUP_WORKERS
        for run in periodic_plans.speedup_runs(LANGUAGE, workers, [0], 1600)
    }
    assert {workers * steps for workers, steps in found} == {200, 400, 800, 1600}
    scales = {rate / (workers / steps) ** 0.5 for (workers, steps), rate in found.items()}
    assert max(scales) == pytest.approx(min(scales))
    assert found[8, 200] == pytest.approx(periodic_plans.SPEEDUP_RATE * LANGUAGE.learning_rate)


def test_speed_up_is_linear_where_loss_depends_on_workers_times_steps(tmp_path):
    outcomes = [
        Outcome(Run(SPEEDUP, seed, total // workers, 0.1), workers, loss=4 / (total + seed) ** 0.5)
        for workers in periodic_plans.SPEEDUP_WORKERS
        for total in (200, 400, 800)
        for seed in (0, 1)
    ]
    rows = periodic_results.speedups(outcomes)
    assert [row.times for row in rows] == [pytest.approx(workers) for workers in periodic_plans.SPEEDUP_WORKERS]
    assert rows[0].target == pytest.approx(4 / 800**0.5, rel=0.01)
    pictures.speedup_plot(rows, tmp_path / "speedup.png", "a title", "a test")
    assert (tmp_path / "speedup.png").read_bytes().startswith(b"\x89PNG")
    assert "8.0" in _text(report.speedup_table(rows, "a title"))


@pytest.mark.parametrize(
    ("target", "steps"), [(2.0, 10.0), (1.0, 100.0), (1.5, 10 * 10**0.5), (3.0, None), (0.5, None)]
)
def test_steps_to_a_loss_lie_between_the_points(target, steps):
    found = periodic_results.steps_to(target, [(10, 2.0), (100, 1.0)])
    assert found == (None if steps is None else pytest.approx(steps))


def test_within_means_no_worse_than_the_worst_seed_of_full_communication():
    def outcome(plan, seed, loss, share):
        return Outcome(
            Run(plan, seed, 1, 1.0), 4, loss=loss, accuracy=0.5, dense_bytes=100, metered_bytes=share, seconds=1
        )

    losses = {FULL: (1.0, 1.1, 1.2), CLAIM[1]: (1.1, 1.1, 1.3), CLAIM[2]: (1.2, 1.2, 1.3)}
    outcomes = [
        outcome(plan, seed, loss, 100 if plan == FULL else 3)
        for plan, each in losses.items()
        for seed, loss in enumerate(each)
    ]
    full, within, above = periodic_results.summary(outcomes)
    assert (full.within, within.within, above.within) == (None, True, False)
    assert within.gap == pytest.approx(0.2 / 3)
    assert within.share == pytest.approx(0.03)
    assert periodic_results.least_volume([full, above]) is full
    assert periodic_results.least_volume([above]) is None


def test_waiting_hidden_is_measured_against_the_same_fragments_without_delay():
    runs = periodic_plans.stream_runs(LANGUAGE, 0)
    waits = (1.0, 3.0, 1.4, 5.0, 2.0)
    outcomes = [Outcome(run, 2, seconds=9.0, optimizer_seconds=wait) for run, wait in zip(runs, waits, strict=True)]
    rows = periodic_results.streams(outcomes)
    assert [row.hidden for row in rows] == [None, None, pytest.approx(0.8), None, pytest.approx(0.75)]
    assert "missed" in _text(report.stream_table(rows, "a title", periodic_results.HIDDEN_LEAST))


def test_plans_have_names_of_their_own_and_the_claim_sends_3_to_5_percent():
    for plans in (CLAIM, VOLUME):
        assert len({plan.label for plan in plans}) == len(plans)
    for plan in CLAIM[1:]:
        (bits,) = re.findall(r"bits=(\d)", plan.method)
        assert 0.03 <= int(bits) / 32 / plan.every <= 0.05


def test_unknown_shapes_are_refused_before_anything_is_measured(tmp_path):
    with pytest.raises(ConfigurationError, match="shapes='vgg' is not known; did you mean 'vgg16'"):
        Bench(Console(), "none", range(1), 64, "digits", None, tmp_path).overhead("vgg")


def test_what_has_been_trained_is_kept_when_a_section_is_interrupted(tmp_path, monkeypatch):
    def interrupted(workload, source, workers, link, runs, *, on_progress, **options):
        outcomes = [Outcome(run, workers) for run in runs]
        for outcome in outcomes[:2]:
            outcome.steps_done, outcome.loss = outcome.run.steps, 0.5
            on_progress(outcomes)
        raise KeyboardInterrupt

    monkeypatch.setattr(periodic, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Bench(Console(), "none", range(1), 64, "digits", None, tmp_path).claim([LANGUAGE])
    read = json.loads((tmp_path / "claim_language.json").read_text())
    assert [each["run"]["plan"]["label"] for each in read["outcomes"]] == [FULL.label, CLAIM[1].label]


def test_overhead_leaves_its_tables_and_a_file(tmp_path, monkeypatch):
    for name, value in (("STREAM_STEPS", 8), ("STREAM_EVERY", 4), ("STREAM_DELAY", 2)):
        monkeypatch.setattr(periodic_plans, name, value)
    monkeypatch.setattr(periodic, "SILENT_ROUNDS", 2)
    monkeypatch.setattr(periodic, "AVERAGE_SECONDS", 0.0)
    usual = periodic.train
    monkeypatch.setattr(periodic, "train", lambda *given, **named: usual(*given, **{**named, "large": False}))
    console = Console(width=160)
    with console.capture() as said:
        Bench(console, "none", range(1), 64, "digits", 1, tmp_path).overhead("tiny")
    assert all(word in said.get() for word in ("adamw", "qsgd:bits=2", "nothing sent"))
    read = json.loads((tmp_path / "overhead.json").read_text())
    assert read["schema"] == "gradwire.bench.periodic/1"
    assert [row["optimizer"] for row in read["silence"]] == ["sgd", "adamw"]
    assert all(row["alone"] > 0 for row in read["silence"])
    averages = {(row["method"], row["workers"]): row for row in read["averages"]}
    assert not any(row["error"] for row in averages.values())
    assert all(len(row["seconds"]) == 3 and row["ratio"] is None for row in averages.values())  # no link, no time of it
    for workers in (2, 4):
        two_bits = averages["qsgd:bits=2,owner=qsgd:2", workers]
        assert averages["dense", workers]["metered_bytes"] / two_bits["metered_bytes"] > 10
    assert len(read["streams"]) == 5


def _text(table):
    console = Console(width=160)
    with console.capture() as capture:
        console.print(table)
    return capture.get()
