"""Keras on its three backends: what is averaged, and what goes on after a restart."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from arrays import SHAPES, asked, assert_measured, by_torch, gradients, remembered, torch_synchronizer
from keras_models import assert_same_everywhere, fit, flat, model, own, samples

from catalogue import OPTIONS
from gradwire import ConfigurationError, methods
from pool import Pool

METHODS: list[tuple[str, dict[str, Any]]] = [("topk", {"ratio": 0.05}), ("acpsgd", {"rank": 2})]


def dense_is_one_process_with_the_whole_batch(options: dict[str, Any]) -> None:
    import gradwire.keras

    workers = dist.get_world_size()
    alone, together = model(), model(seed=1 + dist.get_rank(), **options)  # rank 0's weights are broadcast
    handle = gradwire.keras.compress(together, "dense")
    fit(alone, *samples(160), batch=16)
    fit(together, *own(160, 16), batch=16 // workers)
    assert handle.stats().steps == 10
    assert np.abs(flat(alone) - flat(together)).max() < 1e-6
    assert_same_everywhere(flat(together))
    handle.close()


@pytest.mark.parametrize("workers", [2, 4])
def test_dense_is_one_process_with_the_whole_batch(keras_pool: Pool, workers: int) -> None:
    keras_pool.run(workers, dense_is_one_process_with_the_whole_batch, {})


@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"steps_per_execution": 5}], ids=["eager", "several steps"])
def test_ways_of_running(keras_pool: Pool, options: dict[str, Any], request: pytest.FixtureRequest) -> None:
    if "steps_per_execution" in options and "torch" in request.node.name:
        pytest.skip("Keras takes one step at a time on torch")
    keras_pool.run(2, dense_is_one_process_with_the_whole_batch, options)


def every_method() -> None:
    """An optimizer in a loop of one's own steps by the averages that torch's own way in makes."""
    import keras

    import gradwire.keras

    assert_measured(gradwire.keras.compress(model()))
    for name in methods.names():
        options = OPTIONS.get(name, [{}])[0]
        variables = [
            keras.Variable(np.zeros(shape, np.float32), name=each.replace("/", "_")) for each, shape in SHAPES.items()
        ]
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build(variables)
        handle = gradwire.keras.compress(optimizer, name, **options)
        names = list(handle.cells)
        expected = torch_synchronizer(names, name, **options)
        for step in range(2):
            before = [keras.ops.convert_to_numpy(each.value) for each in variables]
            given = [keras.ops.convert_to_tensor(each) for each in gradients(dist.get_rank(), step)]
            with asked() as ours:
                optimizer.apply(given, variables)
                after = [keras.ops.convert_to_numpy(each.value) for each in variables]
            with asked() as theirs:
                averages = by_torch(expected, names, dist.get_rank(), step)
            assert ours == theirs, name
            assert ours, name
            for place, each in enumerate(after):
                assert np.array_equal(each, before[place] - averages[place]), (name, variables[place].path)
        assert handle.stats().wire_bytes == expected.stats().wire_bytes
        assert remembered(handle) == remembered(expected)
        handle.close()
        expected.close()


def test_every_method_averages_as_with_torch(keras_pool: Pool) -> None:
    keras_pool.run(2, every_method)


def goes_on(folder: str, method: str, options: dict[str, Any]) -> None:
    import keras

    import gradwire.keras

    path, data = f"{folder}/{dist.get_rank()}.keras", own(160, 32)
    net = model()
    handle = gradwire.keras.compress(net, method, **options)
    fit(net, *data, batch=16)
    net.save(path)
    handle.save(folder)
    fit(net, *data, batch=16)
    handle.close()
    again = keras.models.load_model(path)
    resumed = gradwire.keras.compress(again, method, **options)
    resumed.load(folder)
    fit(again, *data, batch=16)
    assert resumed.engine.step == 10
    assert np.array_equal(flat(net), flat(again))
    assert_same_everywhere(flat(again))
    resumed.close()


@pytest.mark.parametrize(("method", "options"), METHODS, ids=[name for name, _ in METHODS])
def test_a_run_that_goes_on_gives_the_same_bits(
    keras_pool: Pool, tmp_path: Path, method: str, options: dict[str, Any]
) -> None:
    keras_pool.run(2, goes_on, str(tmp_path), method, options)


def saves_what_the_method_owes(folder: str) -> Any:
    import gradwire.keras

    net = model()
    handle = gradwire.keras.compress(net, "topk", ratio=0.05)
    fit(net, *own(120, 12), batch=12 // dist.get_world_size())
    handle.save(folder)
    owed = torch.cat([each.view(-1) for each in handle.state_dict()["tensors"]["residual"].values()])
    handle.close()
    return owed


def loads_what_the_method_owes(folder: str) -> Any:
    import gradwire.keras

    handle = gradwire.keras.compress(model(), "topk", ratio=0.05)
    handle.load(folder)
    owed = torch.cat([each.view(-1) for each in handle.state_dict()["tensors"]["residual"].values()])
    handle.close()
    return owed


def test_another_number_of_workers_owes_as_much(keras_pool: Pool, tmp_path: Path) -> None:
    before = torch.stack(keras_pool.run(3, saves_what_the_method_owes, str(tmp_path)))
    after = torch.stack(keras_pool.run(2, loads_what_the_method_owes, str(tmp_path)))
    torch.testing.assert_close(after.mean(0), before.mean(0))


def half_precision() -> None:
    """Infinity on one rank: all skip, nothing is remembered of it, and one scale stays on all."""
    import keras

    import gradwire.keras

    keras.mixed_precision.set_dtype_policy("mixed_float16")
    try:
        net = model()
        words = keras.Sequential([keras.Input((6,)), keras.layers.Embedding(50, 8), keras.layers.Flatten()])
        words.add(keras.layers.Dense(1))
        words.compile("sgd", "mse")
    finally:
        keras.mixed_precision.set_dtype_policy("float32")
    assert isinstance(net.optimizer, keras.optimizers.LossScaleOptimizer)
    handle = gradwire.keras.compress(net, "topk", ratio=0.05)
    inputs, labels = own(64, 32)
    fit(net, inputs, labels, batch=16)
    before, kept, scale = flat(net), remembered(handle), float(net.optimizer.dynamic_scale)
    bad = inputs.copy()
    bad[0] = np.inf if dist.get_rank() == 1 else bad[0]
    net.train_on_batch(bad[:16], labels[:16])
    assert np.array_equal(before, flat(net))
    assert remembered(handle) == kept
    assert float(net.optimizer.dynamic_scale) == scale / 2
    fit(net, inputs, labels, batch=16)
    assert not np.array_equal(before, flat(net))
    assert np.isfinite(flat(net)).all()
    assert_same_everywhere(flat(net))
    assert float(net.optimizer.dynamic_scale) == scale / 2
    handle.close()

    handle = gradwire.keras.compress(words, "dense")  # whose gradients are sparse on TensorFlow
    numbers, before = np.arange(48).reshape(8, 6), flat(words)
    fit(words, numbers, np.ones(8, "float32"), batch=4)
    assert not np.array_equal(before, flat(words))
    assert_same_everywhere(flat(words))
    handle.close()


def test_all_ranks_skip_a_step_together(keras_pool: Pool) -> None:
    keras_pool.run(2, half_precision)


def metrics_of_all() -> None:
    import keras

    import gradwire.keras

    net = model(seed=1 + dist.get_rank())
    handle = gradwire.keras.compress(net, "dense")
    inputs, labels = own(128, 32)
    stop = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=0.02)
    first = gradwire.keras.AverageMetrics()
    history = fit(net, inputs, labels, batch=16, epochs=30, callbacks=[first, stop], validation_split=0.25).history
    assert len(history["loss"]) > 1
    assert_same_everywhere([history[name] for name in sorted(history)])
    assert_same_everywhere(flat(net))
    validated = {"validation_data": (inputs, labels)} if dist.get_rank() else {}
    with pytest.raises(ConfigurationError, match=r"rank 1 has 'val_\w+'; give every rank the same metrics"):
        fit(net, inputs, labels, batch=16, callbacks=[first], **validated)
    handle.close()


def test_metrics_are_averaged_and_compared(keras_pool: Pool) -> None:
    keras_pool.run(2, metrics_of_all)


def metrics_of_classes() -> None:
    """A metric may have a number of each class."""
    import keras

    import gradwire.keras

    noise = np.random.default_rng(dist.get_rank())
    net = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, activation="softmax")])
    net.compile("sgd", "categorical_crossentropy", metrics=[keras.metrics.F1Score(name="f1")])
    handle, own = gradwire.keras.compress(net, "dense"), []
    before = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: own.append(np.array(logs["f1"])))
    inputs, labels = noise.normal(size=(32, 6)).astype("float32"), np.eye(3)[noise.integers(3, size=32)]
    history = fit(net, inputs, labels, batch=16, callbacks=[before, gradwire.keras.AverageMetrics()]).history
    assert isinstance(history["loss"][0], float)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, own[0])
    assert np.array_equal(history["f1"][0], np.mean(everyone, axis=0, dtype="float64"))
    assert not np.array_equal(*everyone)
    other = keras.metrics.F1Score(name="f1", average="macro" if dist.get_rank() else None)
    net.compile(net.optimizer, net.loss, metrics=[other])
    with pytest.raises(
        ConfigurationError, match=r"rank 0 has 'f1\[3\]', rank 1 has 'f1'; give every rank the same met"
    ):
        fit(net, inputs, labels, batch=16, callbacks=[gradwire.keras.AverageMetrics()])
    handle.close()


def test_metrics_of_classes_are_averaged(keras_pool: Pool) -> None:
    keras_pool.run(2, metrics_of_classes)


def uneven() -> None:
    """What would leave a rank waiting for others is told to all."""
    import keras

    import gradwire.keras

    rank = dist.get_rank()
    net = model()
    handle = gradwire.keras.compress(net, "dense")
    inputs, labels = own(128, 32)
    with pytest.raises(
        ConfigurationError, match=r"rank 0 has 'steps=4', rank 1 has 'steps=3'; give every rank as many"
    ):
        fit(net, inputs[: 64 - 16 * rank], labels[: 64 - 16 * rank], batch=16)
    with pytest.raises(ConfigurationError, match="nobody knows how many batches a rank has; give fit steps_per_epoch"):
        net.fit(((inputs[:16], labels[:16]) for _ in range(1 + rank)), verbose=0)
    with pytest.raises(ConfigurationError, match=r"rank 0 has 'steps=None', rank 1 has 'steps=4'; give every rank"):
        fit(net, inputs, labels, batch=16) if rank else net.fit(((inputs[:16], labels[:16]) for _ in "12"), verbose=0)
    before = handle.stats().steps

    def end(epoch: int, logs: Any) -> None:
        net.stop_training = rank == 1

    alone = keras.callbacks.LambdaCallback(on_epoch_end=end)
    told = r"rank 0 has 'epoch 1 .*rank 1 has 'the end .*have what ends training do so on all ranks"
    with pytest.raises(ConfigurationError, match=told):
        fit(net, inputs, labels, batch=16, epochs=3, callbacks=alone)
    assert handle.stats().steps == before + 4

    def end_alike(batch: int, logs: Any) -> None:
        net.stop_training = batch == 2

    fit(
        net,
        inputs,
        labels,
        batch=16,
        epochs=3,
        callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=end_alike)],
    )
    assert handle.stats().steps == before + 7
    assert_same_everywhere(flat(net))
    handle.close()

    handle = gradwire.keras.compress(net, "dense", process_group=dist.new_group(timeout=timedelta(seconds=4)))

    def end_within(batch: int, logs: Any) -> None:
        net.stop_training = rank == 1

    told = "rank 0 of 2 did not come to end training after 1 batches within" if rank else "within the process group's"
    with pytest.raises(Exception, match=told):
        fit(net, inputs, labels, batch=16, callbacks=keras.callbacks.LambdaCallback(on_train_batch_end=end_within))
    dist.barrier()
    handle.close()

    net = model()  # Keras on JAX has given the last one's arrays away
    handle = gradwire.keras.compress(net, "dense")
    few = ((inputs[:16], labels[:16]) for _ in range(2 if rank else 9))
    with pytest.raises(Exception, match="ended after 2 of 4; give" if rank else "a worker ended or failed|was closed"):
        net.fit(few, steps_per_epoch=4, verbose=0)
    handle.close()


def test_uneven_training_is_told(keras_pool: Pool) -> None:
    keras_pool.run(2, uneven)


def alone() -> None:
    import gradwire.keras

    net = model()
    handle = gradwire.keras.compress(net, "topk", ratio=0.05, audit_every=1, verify_every=1)
    fit(net, *samples(64), batch=16, callbacks=[gradwire.keras.AverageMetrics()])
    assert handle.stats().steps == 4
    assert len(handle.audits()) == 4
    assert 0.2 < handle.audits()[0].whole.cosine < 1
    handle.close()


def test_a_process_alone(keras_pool: Pool) -> None:
    keras_pool.run(1, alone)
