"""Ray Train, through the example: the workers' states go through Ray's checkpoints, also to fewer workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradwire.errors import ConfigurationError
from pool import Pool

pytest.importorskip("ray.train")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What ``tests/ray_runs.py`` prints."""
    folder = tmp_path_factory.mktemp("ray")
    environment = {**os.environ, "HOME": str(folder), "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "examples"), *sys.path])
    command = [sys.executable, str(ROOT / "tests" / "ray_runs.py"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"weights"')))


def not_prepared() -> None:
    from gradwire.integrations.ray import compress

    with pytest.raises(ConfigurationError, match=r"model is a Linear; give what ray.train.torch.prepare_model"):
        compress(nn.Linear(40, 40), "topk")


def test_a_model_that_is_not_prepared(pool: Pool) -> None:
    pool.run(2, not_prepared)


def test_a_run_that_goes_on_gives_the_same_bits(found: Any) -> None:
    straight, again = found["weights"]
    assert straight == again
    assert straight[1] == ["gradwire-rank-0.pt", "gradwire-rank-1.pt", "model.pt"]
    assert found["metrics"]["step"] == 4
    assert found["metrics"]["gradwire/steps"] == 2
    assert found["metrics"]["gradwire/ratio"] > 1


def test_another_number_of_workers_owes_as_much(found: Any) -> None:
    """Two go on from what three saved."""
    before, after = (torch.tensor(each) for each in found["owed"])
    assert before.any()
    torch.testing.assert_close(after, before)


def test_dense_is_what_a_prepared_model_does(found: Any) -> None:
    assert found["looked"]["same"] is True


def test_a_scaler_that_is_given_counts(found: Any) -> None:
    assert found["looked"]["scaled"] is True


def test_a_model_is_attached_to_once(found: Any) -> None:
    assert "has the communication hook '_on_bucket' already; DDP takes one" in found["looked"]["twice"]
    assert not [line for line in found["looked"]["told"] if "no states" in line]


def test_a_checkpoint_without_states_starts_empty(found: Any) -> None:
    (line,) = [line for line in found["empty"]["told"] if "no states" in line]
    assert "has no states of gradwire: what compression remembers starts empty" in line
