"""``gradwire bench train --framework``: the image task in other frameworks, and what of it is refused."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gradwire import ConfigurationError, cli
from gradwire_bench.placement import Framework
from gradwire_bench.train import check_framework, contenders
from gradwire_bench.workloads import WORKLOADS


@pytest.mark.parametrize("framework", ["keras-tf", "keras-jax", "jax"])
def test_a_race(
    framework: str, tmp_path: Path, quick_keras: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", quick_keras("tensorflow" if framework == "keras-tf" else "jax"))
    small = ["--workers", "2", "--link", "none", "--steps", "10", "--batch", "16", "--dataset", "digits"]
    asked = ["bench", "train", "topk", "--framework", framework, *small, "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["gradwire", *asked])
    assert cli.main() == 0
    records = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert [each["cell"]["method"] for each in records] == ["dense", "topk"]
    assert all(each["cell"]["framework"] == framework for each in records)
    dense, topk = (each["result"] for each in records)
    for row in (dense, topk):
        assert len(row["step_seconds"]) == len(row["losses"]) == 10
        assert row["losses"][-1] < row["losses"][0]
        assert row["accuracy"] > 0.3
    assert dense["dense_bytes"] == topk["dense_bytes"] == 4 * 1_228_234
    assert dense["metered_bytes"] == pytest.approx(dense["dense_bytes"], rel=1e-3)
    assert topk["metered_bytes"] < dense["metered_bytes"] / 50


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    framework: Framework = "keras-tf"
    with pytest.raises(ConfigurationError, match=r"torch-fp16 is torch's; leave it out, or choose --framework torch"):
        contenders(["ddp", "torch-fp16"], framework)
    assert [str(each) for each in contenders(["ddp", "bf16"], framework)] == ["dense", "bf16"]
    with pytest.raises(ConfigurationError, match=r"workload 'gpt' is in torch only; with --framework keras-tf take"):
        check_framework(framework, WORKLOADS["gpt"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"needs keras, which is not installed; run pip install keras tensorf"):
        check_framework(framework, WORKLOADS["image"])
    check_framework("torch", WORKLOADS["gpt"])
