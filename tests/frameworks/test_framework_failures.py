"""Workers that are killed, that go their own way or have another model, and what the others are told."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import dying
import numpy as np
import pytest
import torch.distributed as dist
from arrays import gradients
from synchronizers import FRAMEWORKS, attached, broadcast

from gradwire import ConfigurationError, WireError
from pool import FORKING, Pool


def killed(framework: str, folder: Path) -> None:
    """In processes of their own, which have imported as much as those of the pool."""
    workers = [FORKING.Process(target=dying.main, args=(framework, folder, rank)) for rank in range(2)]
    for each in workers:
        each.start()
    try:
        for each in workers:
            each.join(240)
        assert [each.exitcode for each in workers] == [0, 7]
    finally:
        for each in workers:
            each.kill()
            each.join()
    said = json.loads((folder / "told.json").read_text())
    assert said["seconds"] < 5  # and not the group's timeout
    assert "the connection was closed" in said["text"]
    assert "a worker ended or failed" in said["text"]
    assert said["failed"] == WireError.__name__


@pytest.mark.usefixtures("keras_pool")
def test_a_killed_worker_ends_the_others(tmp_path: Path) -> None:
    killed("keras", tmp_path)


@pytest.mark.usefixtures("framework_pool")
def test_a_killed_worker_ends_the_others_loops(framework: str, tmp_path: Path) -> None:
    killed(framework, tmp_path)


def other_shapes(framework: str) -> None:
    rank = dist.get_rank()
    with pytest.raises(
        ConfigurationError, match=r"ranks differ: rank 0 has 'parameter .* with shape \(40, 41\).*rank 1 .*\(40, 40\)"
    ):
        attached(framework, "topk", [np.zeros((40, 41 - rank), "float32")])
    more = [np.zeros((40, 40), "float32")] * (1 + rank)
    with pytest.raises(ConfigurationError, match=r"ranks differ: rank 0 has 'nothing', rank 1 has 'parameter 1"):
        attached(framework, "topk", more)
    with pytest.raises(ConfigurationError, match=r"rank 0 has 'nothing', rank 1 has 'array 1 of shape \(40, 40\)"):
        broadcast(framework, more)


def test_other_shapes_are_told(framework: str, framework_pool: Pool) -> None:
    framework_pool.run(2, other_shapes, framework)


def ends_early(framework: str) -> float:
    """Rank 1 leaves its loop and lives on: the others wait for as long as the process group allows, and are told."""
    group = dist.new_group(timeout=timedelta(seconds=4))
    sync, average = attached(framework, "topk", ratio=0.05, process_group=group)
    average(gradients(dist.get_rank(), 0))
    waited = 0.0
    if dist.get_rank() == 0:
        started = time.monotonic()
        with pytest.raises(Exception, match=r"no answer within the process group's timeout of 4 s: a worker han"):
            average(gradients(0, 1))
        assert isinstance(sync.failed, WireError)
        waited = time.monotonic() - started
    dist.barrier()
    sync.close()
    return waited


def test_a_worker_that_leaves_its_loop_is_waited_for(framework: str, framework_pool: Pool) -> None:
    waited, _ = framework_pool.run(2, ends_early, framework)
    assert 3 < waited < 60


DEVICES = {
    "tensorflow": """
import tensorflow as tf
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2)
import gradwire.tensorflow
attach = lambda: gradwire.tensorflow.Synchronizer([tf.Variable([1.0])], "dense")
""",
    "jax": """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax.numpy as jnp
import gradwire.jax
attach = lambda: gradwire.jax.Synchronizer(jnp.ones(3), "dense")
""",
}
REFUSED = """
import gradwire, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
try:
    attach()
except gradwire.ConfigurationError as error:
    print(error)
"""


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_several_devices_are_told(framework: str) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed; make test-frameworks installs it")
    command, told = [sys.executable, "-c", DEVICES[framework] + REFUSED], {"TF_CPP_MIN_LOG_LEVEL": "3"}
    said = subprocess.run(command, env={**os.environ, **told}, capture_output=True, text=True, timeout=240, check=True)
    assert "this process has 2 devices of " in said.stdout
    assert "start a process for each, without " in said.stdout
