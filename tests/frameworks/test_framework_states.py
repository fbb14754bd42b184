"""States of TensorFlow's and JAX' loops, beside their own checkpoints and of other numbers of workers; audits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from arrays import gradients
from synchronizers import attached

from gradwire import DivergenceError
from gradwire.engine import Unit
from gradwire.engine.guards import Guard
from pool import Pool

METHODS: list[tuple[str, dict[str, Any]]] = [("topk", {"ratio": 0.05}), ("acpsgd", {"rank": 2})]


def beside_checkpoints_of_tensorflow(folder: str, method: str, options: dict[str, Any]) -> None:
    import tensorflow as tf

    import gradwire.tensorflow

    rank = dist.get_rank()

    def begun() -> tuple[Any, Any, Any]:
        variables = [tf.Variable(each) for each in gradients(0, 9)]
        sync = gradwire.tensorflow.Synchronizer(variables, method, **options)
        return sync, tf.train.Checkpoint(variables=variables), variables

    def train(sync: Any, variables: Any, steps: range) -> list[Any]:
        average = tf.function(sync.average)
        for number in steps:
            averages = average([tf.constant(each) for each in gradients(rank, number)])
            for variable, each in zip(variables, averages, strict=True):
                variable.assign_sub(0.1 * each)
        return [variable.numpy() for variable in variables]

    sync, checkpoint, variables = begun()
    train(sync, variables, range(3))
    checkpoint.write(f"{folder}/tensorflow-{rank}")
    sync.save(folder)
    straight = train(sync, variables, range(3, 6))
    sync.close()
    sync, checkpoint, variables = begun()
    checkpoint.read(f"{folder}/tensorflow-{rank}").assert_consumed()
    sync.load(folder)
    resumed = train(sync, variables, range(3, 6))
    assert all(np.array_equal(one, other) for one, other in zip(straight, resumed, strict=True))
    assert sync.steps() == 6
    sync.close()


@pytest.mark.parametrize(("method", "options"), METHODS, ids=[name for name, _ in METHODS])
def test_beside_checkpoints_of_tensorflow(
    tensorflow_pool: Pool, tmp_path: Path, method: str, options: dict[str, Any]
) -> None:
    tensorflow_pool.run(2, beside_checkpoints_of_tensorflow, str(tmp_path), method, options)


def beside_checkpoints_of_orbax(folder: str, method: str, options: dict[str, Any]) -> None:
    import jax
    import optax
    import orbax.checkpoint
    from test_jax import inputs, same, start, steps

    import gradwire.jax

    def begun() -> tuple[Any, Any]:
        sync = gradwire.jax.Synchronizer(start(), method, **options)
        return sync, optax.chain(sync.transformation(), optax.adam(0.01))

    batches = [inputs(dist.get_rank(), step) for step in range(6)]
    sync, optimizer = begun()
    trained = steps(optimizer, start(), optimizer.init(start()), batches[:3])
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        if dist.get_rank() == 0:
            checkpointer.save(f"{folder}/orbax", trained)
            checkpointer.wait_until_finished()
        sync.save(folder)
        dist.barrier()
        straight = jax.tree.map(np.array, steps(optimizer, *trained, batches[3:]))
        sync.close()
        sync, optimizer = begun()
        restored = checkpointer.restore(f"{folder}/orbax", (start(), optimizer.init(start())))
    sync.load(folder)
    assert same(straight, steps(optimizer, *restored, batches[3:]))
    assert sync.steps() == 6
    sync.close()


@pytest.mark.parametrize(("method", "options"), METHODS, ids=[name for name, _ in METHODS])
def test_beside_checkpoints_of_orbax(jax_pool: Pool, tmp_path: Path, method: str, options: dict[str, Any]) -> None:
    jax_pool.run(2, beside_checkpoints_of_orbax, str(tmp_path), method, options)


def owed(sync: Any) -> torch.Tensor:
    return torch.cat([each.view(-1) for each in sync.state_dict()["tensors"]["residual"].values()])


def saves_what_the_method_owes(framework: str, folder: str) -> torch.Tensor:
    sync, average = attached(framework, "topk", ratio=0.05)
    for step in range(3):
        average(gradients(dist.get_rank(), step))
    sync.save(folder)
    found = owed(sync)
    sync.close()
    return found


def loads_what_the_method_owes(framework: str, folder: str) -> torch.Tensor:
    sync, average = attached(framework, "topk", ratio=0.05)
    sync.load(folder)
    found = owed(sync)
    average(gradients(dist.get_rank(), 3))
    assert sync.steps() == 4
    sync.close()
    return found


def test_another_number_of_workers_owes_as_much(framework: str, framework_pool: Pool, tmp_path: Path) -> None:
    before = torch.stack(framework_pool.run(3, saves_what_the_method_owes, framework, str(tmp_path)))
    after = torch.stack(framework_pool.run(2, loads_what_the_method_owes, framework, str(tmp_path)))
    assert float(before.abs().max()) > 0
    torch.testing.assert_close(after.mean(0), before.mean(0))


class Spoiled(Guard):
    """One value of an average is another here."""

    def after_decode(self, unit: Unit, average: torch.Tensor) -> None:
        average[unit.slots[0].offset] += 0.01


def verified_and_audited(framework: str) -> None:
    sync, average = attached(framework, "topk", ratio=0.05, audit_every=2, verify_every=1)
    for step in range(4):
        average(gradients(dist.get_rank(), step))
    audits = sync.audits()
    assert [each.step for each in audits] == [audits[0].step, audits[0].step + 2]
    assert all(0.1 < each.whole.cosine < 1 for each in audits)
    if dist.get_rank() == 1:
        sync.engine.guards.append(Spoiled())
    average(gradients(dist.get_rank(), 4))
    with pytest.raises(Exception, match="averaged gradients are not the same on all ranks"):
        average(gradients(dist.get_rank(), 5))
    assert isinstance(sync.failed, DivergenceError)
    sync.close()


def test_averages_are_verified_and_audited(framework: str, framework_pool: Pool) -> None:
    framework_pool.run(2, verified_and_audited, framework)
