"""Ray Train, through the example: the workers' states go through Ray's checkpoints, also to fewer workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from gradwire.errors import ConfigurationError
from pool import Pool

pytest.importorskip("ray.train")

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = """
import hashlib, json, sys
from pathlib import Path

import ray
import torch

import with_ray

ray.init(num_cpus=3, include_dashboard=False, object_store_memory=100_000_000)

def weights(result):
    with result.checkpoint.as_directory() as folder:
        saved = torch.load(Path(folder, "model.pt"), weights_only=True)
        files = sorted(path.name for path in Path(folder).iterdir())
    return [hashlib.sha256(each.numpy().tobytes()).hexdigest() for each in saved["model"].values()], files

folder = sys.argv[1]
straight = with_ray.run(folder + "/straight", 4, 2, 2)
with_ray.run(folder + "/again", 2, 2, 2)
again = with_ray.run(folder + "/again", 4, 2, 2)
with_ray.run(folder + "/fewer", 2, 2, 3)
fewer = with_ray.run(folder + "/fewer", 4, 2, 2)
results = [straight, again, fewer]
print(json.dumps({"weights": [weights(each) for each in results], "metrics": [each.metrics for each in results]}))
"""


def not_prepared() -> None:
    from gradwire.integrations.ray import compress

    with pytest.raises(ConfigurationError, match=r"model is a Linear; give what ray.train.torch.prepare_model"):
        compress(nn.Linear(40, 40), "topk")


def test_a_model_that_is_not_prepared(pool: Pool) -> None:
    pool.run(2, not_prepared)


def test_a_run_that_goes_on_gives_the_same_bits(tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(EXAMPLES), *sys.path])
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"weights"')))
    straight, again, fewer = said["weights"]
    assert straight == again
    assert straight[0] != fewer[0]
    assert straight[1] == fewer[1] == ["gradwire-rank-0.pt", "gradwire-rank-1.pt", "model.pt"]
    for metrics in said["metrics"][1:]:
        assert metrics["step"] == 4
        assert metrics["gradwire/steps"] == 2
        assert metrics["gradwire/ratio"] > 1
