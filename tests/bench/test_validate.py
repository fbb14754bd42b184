"""The validation in the docs is of this code; what is calibrated is not what is reported."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path

import pytest

from gradwire.cli import costs
from gradwire_bench import validate
from gradwire_bench.validate import Fit, Point
from gradwire_bench.validate_worker import as_plain

DATA = Path(__file__).parents[2] / "docs" / "data" / "validate.json"


def test_what_the_docs_say_was_predicted_is_predicted() -> None:
    """By the model as it is; after a change of it: gradwire bench validate --again docs/data/validate.json."""
    document = json.loads(DATA.read_text())
    points, probes = validate.read(document)
    quick = [point for point in points if point.method in ("ddp", "bf16", "topk:ratio=0.01")]
    assert {point.mode for point in quick} == set(validate.MODES)
    for point, known in zip(validate.again(quick, probes, Fit(**document["fit"])), quick, strict=True):
        assert point.predicted == pytest.approx(known.predicted, rel=1e-6)
        assert replace(point, predicted=0.0, stages={}) == replace(known, predicted=0.0, stages={})


def test_what_a_worker_says_that_it_computes_is_what_is_read() -> None:
    _, (probed, *_) = validate.read(json.loads(DATA.read_text()))
    seen = validate.setting_of(probed, Fit()).workload
    said = json.loads(json.dumps(as_plain(seen)))
    assert validate.setting_of({**probed, "workload": said}, Fit()).workload == seen


def points(predicted: dict[str, float], measured: dict[str, float], link: str = "1gbit") -> list[Point]:
    return [
        Point(name, link, 2, "sync", predicted[name], seconds, (0.9 * seconds, 1.1 * seconds), {}, {})
        for name, seconds in measured.items()
    ]


def test_errors_tell_a_wrong_recommendation_from_a_right_one() -> None:
    told = {"ddp": 2.0, "bf16": 1.0, "topk": 0.5, "acpsgd": 0.6}
    right = validate.errors(points(told, told))
    shares = {"best_three_right": 1.0, "best_three_within_spread": 1.0, "recommended_and_slower": 0.0}
    assert right == {"median": 0.0, "p90": 0.0, "best_three_at_best": 1.0, **shares}
    wrong = validate.errors(points(told, {**told, "topk": 1.5}))
    assert wrong["recommended_and_slower"] == 1.0
    assert validate.errors(points(told, {**told, "topk": 2.5}))["best_three_right"] == 0.0
    near = validate.errors(points(told, {**told, "bf16": 1.2, "ddp": 1.1}))  # quartiles do not tell these two apart
    assert (near["best_three_right"], near["best_three_within_spread"]) == (0.0, 1.0)
    hidden = validate.errors(points({**told, "topk": 0.99, "acpsgd": 1.2}, {**told, "topk": 1.5}))
    assert hidden["recommended_and_slower"] == 0.0  # it would not be recommended
    exact = validate.signed(points(told, {name: 2 * value for name, value in told.items()}))
    assert exact["signed, by method"] == dict.fromkeys(told, -0.5)


def test_at_best_a_prediction_is_what_is_measured_most_often() -> None:
    """Of four the third and fourth take the same, so that each of two sets is measured in half of the cases."""
    told = {"ddp": 1.0, "bf16": 2.0, "topk": 100.0, "acpsgd": 100.0}
    measured = points(told, told)
    assert validate.errors(measured)["best_three_at_best"] == pytest.approx(0.5, abs=0.024)  # 3 standard errors
    apart = [replace(each, measured=50.0) if each.method == "topk" else each for each in measured]
    assert validate.errors(apart)["best_three_at_best"] == 1.0


def test_as_many_steps_are_drawn_as_the_command_times() -> None:
    assert inspect.signature(costs.validate).parameters["steps"].default == validate.STEPS


def test_settings_to_calibrate_by_are_not_those_reported() -> None:
    document = json.loads(DATA.read_text())
    every, _ = validate.read(document)
    first, other = validate.parted(every)
    assert {point.setting for point in first}.isdisjoint(point.setting for point in other)
    assert len(first) + len(other) == len(every)
    for axis in range(3):
        assert {point.setting[axis] for point in first} == {point.setting[axis] for point in other}


def test_constants_that_were_in_what_was_measured_are_found() -> None:
    """Where the model itself, with constants, takes the place of a measurement."""
    document = json.loads(DATA.read_text())
    every, probes = validate.read(document)
    few = [point for point in every if point.method in ("bf16", "acpsgd:rank=4") and point.workers == 2]
    there = Fit(late=2e-3, turn=5e-4)
    measured = [replace(point, measured=point.predicted) for point in validate.again(few, probes, there)]
    found = validate.calibrated(measured, probes, lambda text: None)
    assert found.late == pytest.approx(there.late, rel=0.6)
    told = validate.again(measured, probes, found)
    assert validate.errors(told)["median"] < 0.05
