"""The validation in the docs is of this code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradwire_bench import validate

DATA = Path(__file__).parents[2] / "docs" / "data" / "validate.json"


def test_what_the_docs_say_was_predicted_is_predicted() -> None:
    """By the model and the profile as they are; after a change of either: gradwire bench validate --again."""
    document = json.loads(DATA.read_text())
    quick = ("ddp", "bf16", "topk:ratio=0.01")
    document["points"] = [point for point in document["points"] if point["method"] in quick]
    points = validate.again(document, "epyc")
    assert len(points) == 18
    for point, known in zip(points, document["points"], strict=True):
        assert point.predicted == pytest.approx(known["predicted"], rel=1e-6)
        assert (point.link, point.workers, point.measured) == (known["link"], known["workers"], known["measured"])
