"""TensorFlow: gradients of a tape, in a graph and out of it, and nothing copied that need not be."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from arrays import SHAPES, asked, assert_measured, by_torch, gradients, remembered, torch_synchronizer

from catalogue import OPTIONS
from gradwire import ConfigurationError, WireError, methods
from pool import Pool


def variables() -> list[Any]:
    import tensorflow as tf

    noise = np.random.default_rng(7)
    return [tf.Variable(np.float32(noise.normal(size=shape)), name=name) for name, shape in SHAPES.items()]


def every_method() -> None:
    import tensorflow as tf

    import gradwire.tensorflow

    assert_measured(gradwire.tensorflow.Synchronizer(variables()))
    for name in methods.names():
        options = OPTIONS.get(name, [{}])[0]
        sync = gradwire.tensorflow.Synchronizer(variables(), name, **options)
        names = list(sync.cells)
        expected, average = torch_synchronizer(names, name, **options), tf.function(sync.average)
        for step in range(3):
            with asked() as ours:
                averages = average([tf.constant(each) for each in gradients(dist.get_rank(), step)])
            with asked() as theirs:
                wanted = by_torch(expected, names, dist.get_rank(), step)
            assert ours == theirs, name
            assert ours, name
            for each, value in zip(averages, wanted, strict=True):
                assert np.array_equal(each.numpy(), value), name
        assert sync.stats().wire_bytes == expected.stats().wire_bytes
        assert sync.stats().dense_bytes == expected.stats().dense_bytes
        assert remembered(sync) == remembered(expected)
        sync.close()
        expected.close()


def test_every_method_averages_as_with_torch(tensorflow_pool: Pool) -> None:
    tensorflow_pool.run(2, every_method)


def inputs(rank: int, step: int) -> Any:
    return np.random.default_rng(10 * step + rank).normal(size=(16, 12)).astype("float32")


def trained(average: Any, ranks: list[int]) -> list[Any]:
    """A loop with a tape in a graph; the mean of what some ranks see."""
    import tensorflow as tf

    noise = np.random.default_rng(3)
    weights = [tf.Variable(noise.normal(size=shape).astype("float32")) for shape in ((12, 30), (30,), (30, 4))]

    @tf.function
    def step(values: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.tanh(values @ weights[0] + weights[1]) @ weights[2] - 1))
        for weight, gradient in zip(weights, average(weights, tape, loss), strict=True):
            weight.assign_sub(0.1 * gradient)

    for number in range(8):
        step(np.concatenate([inputs(rank, number) for rank in ranks]))
    return [weight.numpy() for weight in weights]


def tapes() -> None:
    import tensorflow as tf

    import gradwire.tensorflow as gradwire_tensorflow

    made: list[Any] = []

    def sync(weights: list[Any]) -> Any:
        with tf.init_scope():
            if not made:
                made.append(gradwire_tensorflow.Synchronizer(weights, "dense"))
        return made[0]

    def averaged(weights: list[Any], tape: Any, loss: Any) -> Any:
        return sync(weights).average(tape.gradient(loss, weights))

    def by_tape(weights: list[Any], tape: Any, loss: Any) -> Any:
        distributed = gradwire_tensorflow.DistributedGradientTape(tape, sync(weights))
        assert distributed.watched_variables()
        return distributed.gradient(loss, weights[::-1])[::-1]

    alone = trained(lambda weights, tape, loss: tape.gradient(loss, weights), [0, 1])
    for way in (averaged, by_tape):
        together = trained(way, [dist.get_rank()])
        assert made.pop().stats().steps == 8
        assert max(np.abs(one - other).max() for one, other in zip(alone, together, strict=True)) < 1e-6


def test_a_loop_is_one_process_with_the_whole_batch(tensorflow_pool: Pool) -> None:
    tensorflow_pool.run(2, tapes)


def kinds_of_gradients() -> None:
    """Sparse ones are made dense, missing ones count as zero, half precision stays half precision."""
    import tensorflow as tf

    import gradwire.tensorflow

    rank = dist.get_rank()
    each = [tf.Variable(tf.zeros((50, 30))), tf.Variable(tf.zeros((40,), tf.bfloat16)), tf.Variable(tf.zeros((3,)))]
    sync = gradwire.tensorflow.Synchronizer(each, "dense")
    sparse = tf.IndexedSlices(tf.ones((2, 30)), tf.constant([rank, 4]), tf.constant([50, 30]))
    for average in (sync.average, tf.function(sync.average)):
        first, second, third = average([sparse, tf.fill((40,), tf.cast(rank, tf.bfloat16)), None])
        wanted = np.zeros((50, 30))
        wanted[[0, 1]], wanted[4] = 0.5, 1
        assert np.array_equal(first.numpy(), wanted)
        assert second.dtype == tf.bfloat16
        assert np.array_equal(second.numpy().astype("float32"), np.full(40, 0.5))
        assert np.array_equal(third.numpy(), np.zeros(3))
    with pytest.raises(ConfigurationError, match=r"there are 2 gradients for 3 parameters; give one of each"):
        sync.average([sparse, None])
    with pytest.raises(
        ConfigurationError, match=r"the gradient of '2\.Variable' has shape \(7,\), the parameter has \(3,\)"
    ):
        sync.average([sparse, None, tf.zeros(7)])
    with pytest.raises(ConfigurationError, match="all gradients are None: the loss depends on none"):
        sync.average([None] * 3)
    with pytest.raises(ConfigurationError, match=r"the gradient of '2\.Variable' is int32; give float32"):
        sync.average([sparse, None, tf.constant([1, 2, 3])])
    sometimes = tf.function(sync.average, reduce_retracing=True)  # of one rank only, and of lengths that it forgets
    for rows in (3, 2, 1):
        ours = tf.IndexedSlices(tf.ones((rows, 30)), tf.range(rows), tf.constant([50, 30]))
        first, _, third = sometimes([ours, tf.zeros((40,), tf.bfloat16), tf.ones(3) if rank else None])
        assert np.array_equal(first.numpy().sum(1), np.where(np.arange(50) < rows, 30, 0))
        assert np.array_equal(third.numpy(), np.full(3, 0.5))
    forgetful = tf.function(
        sync.average, input_signature=[[tf.TensorSpec(None), tf.TensorSpec(None), tf.TensorSpec([None])]]
    )
    assert np.array_equal(forgetful([np.ones((50, 30)), np.ones(40), np.ones(3)])[2].numpy(), np.ones(3))
    with pytest.raises(tf.errors.InvalidArgumentError, match="PyFunc"):
        tf.function(sync.average, jit_compile=True)([tf.zeros((50, 30)), None, None])
    assert sync.stats().steps == 6
    sync.close()
    wide = gradwire.tensorflow.Synchronizer([tf.Variable(tf.zeros(3, tf.float64))], "dense")
    (average,) = wide.average([tf.fill((3,), tf.cast(rank, tf.float64))])
    assert average.dtype == tf.float64
    assert np.array_equal(average.numpy(), np.full(3, 0.5))
    wide.close()
    with pytest.raises(ConfigurationError, match=r"'0\.Variable' has dtype int32"):
        gradwire.tensorflow.Synchronizer([tf.Variable([1, 2])], "dense")
    for wrong in (each[0], [np.zeros(3, "float32")], [tf.zeros(3)]):
        with pytest.raises(
            ConfigurationError, match=r"(EagerTensor|ndarray) is no variable; give a list of tf\.Variable"
        ):
            gradwire.tensorflow.Synchronizer(wrong, "dense")
        with pytest.raises(
            ConfigurationError, match=r"(EagerTensor|ndarray) is no variable; give a list of tf\.Variable"
        ):
            gradwire.tensorflow.broadcast(wrong)
    other = [tf.Variable(tf.fill((40, 40), float(rank)))]
    with pytest.raises(ConfigurationError, match="other values on rank 1 than on rank 0"):
        gradwire.tensorflow.Synchronizer(other, "topk")
    gradwire.tensorflow.broadcast(other)
    gradwire.tensorflow.Synchronizer(other, "topk").close()
    made, within = partial(gradwire.tensorflow.Synchronizer, other, "topk"), r"a tf\.function variables have no values"
    for ours in (rank == 0, True):  # on one rank, and on all
        with pytest.raises(Exception, match=within):
            tf.function(lambda: made().averages)() if ours else made()
    with pytest.raises(Exception, match=within):
        tf.function(gradwire.tensorflow.broadcast)(other)
    with tf.GradientTape() as tape:
        loss = rank * tf.reduce_sum(other[0])
    tape = gradwire.tensorflow.DistributedGradientTape(tape, gradwire.tensorflow.Synchronizer(other, "dense"))
    assert np.array_equal(tape.gradient(loss, {"only": other[0]})["only"].numpy(), np.full((40, 40), 0.5))
    tape = gradwire.tensorflow.DistributedGradientTape(tf.GradientTape(), sync)
    for wrong in (tf.Variable(1.0), tf.zeros(3)):
        with pytest.raises(ConfigurationError, match="is none of the synchronizer's variables"):
            tape.gradient(tf.zeros(()), [wrong])


def test_kinds_of_gradients(tensorflow_pool: Pool) -> None:
    tensorflow_pool.run(2, kinds_of_gradients)


def tapes_of_some_variables() -> None:
    """What a method owes to variables that a tape is not asked for waits for the next that is."""
    import tensorflow as tf

    import gradwire.tensorflow

    noise = np.random.default_rng(dist.get_rank())
    both = [tf.Variable(tf.zeros((40, 40))) for _ in range(2)]
    sync = gradwire.tensorflow.Synchronizer(both, "topk", ratio=0.05)
    seen, taken = np.zeros((2, 40, 40), "float32"), np.zeros((2, 40, 40), "float32")
    for step in range(4):
        chosen = [1, 0][step % 2 :]
        given = noise.normal(size=(len(chosen), 40, 40)).astype("float32")
        seen[chosen] += given
        asked = [both[each] for each in chosen]
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(each * value) for each, value in zip(asked, given, strict=True)])
        taken[chosen] += gradwire.tensorflow.DistributedGradientTape(tape, sync).gradient(loss, asked)
    residual = sync.state_dict()["tensors"]["residual"]
    sent = torch.from_numpy(seen) - torch.stack([residual[name] for name in sync.cells])
    dist.all_reduce(sent)
    assert np.abs(sent.numpy() / 2 - taken).max() < 1e-5
    sync.close()


def test_tapes_of_some_variables(tensorflow_pool: Pool) -> None:
    tensorflow_pool.run(2, tapes_of_some_variables)


def a_rank_fails() -> float:
    import tensorflow as tf

    import gradwire.tensorflow

    sync = gradwire.tensorflow.Synchronizer(variables(), "topk", ratio=0.05)
    average = tf.function(sync.average)
    given = gradients(dist.get_rank(), 0)
    average(given)
    dist.barrier()
    started = time.monotonic()
    if dist.get_rank() == 1:
        sync.close()
        with pytest.raises(tf.errors.OpError, match="the handle was closed"):
            average(given)
        return 0
    with pytest.raises(tf.errors.OpError, match=r"the connection was closed.*a worker ended or failed"):
        average(given)
    assert isinstance(sync.failed, WireError)
    assert sync.failed.step == 1
    with pytest.raises(tf.errors.OpError, match="an earlier step failed, so this handle can do no more"):
        average(given)
    sync.close()
    return time.monotonic() - started


def test_a_rank_that_ends_is_told_of(tensorflow_pool: Pool) -> None:
    assert max(tensorflow_pool.run(2, a_rank_fails)) < 20  # and not the group's timeout
