"""Keras: which models are trained and how they may be fitted; what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from keras_models import assert_same_everywhere, fit, flat, model, own, samples

from gradwire import ConfigurationError
from pool import Pool


def two_heads(**options: Any) -> Any:
    import keras

    keras.utils.set_random_seed(1)
    given = keras.Input((8, 8, 1))
    hidden = keras.layers.Dense(12, activation="relu")(keras.layers.Flatten()(given))
    heads = {"classes": keras.layers.Dense(5)(hidden), "size": keras.layers.Dense(1)(hidden)}
    net = keras.Model(given, heads)
    losses = {"classes": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "size": "mse"}
    net.compile(keras.optimizers.SGD(0.05, momentum=0.9), losses, loss_weights={"classes": 1.0, "size": 0.3}, **options)
    return net


def fits_of_all_kinds() -> None:
    """Several outputs, weights of samples, validation and two fits are as in one process; a gradient may be missing."""
    import keras

    import gradwire.keras

    def trained(net: Any, share: slice, batch: int) -> Any:
        inputs, labels = samples(96)
        weights = {"classes": np.linspace(0, 1, 96, dtype="float32"), "size": np.ones(96, "float32")}
        targets = {"classes": labels, "size": np.float32(labels[:, None])}
        mine = np.arange(96).reshape(-1, 16)[:, share].reshape(-1)
        chosen = [{name: each[mine] for name, each in kinds.items()} for kinds in (targets, weights)]
        for _ in range(2):
            net.fit(
                inputs[mine], chosen[0], sample_weight=chosen[1], batch_size=batch, epochs=2, steps_per_epoch=3,
                shuffle=False, verbose=0, validation_data=(inputs, targets),
            )  # fmt: skip
        return flat(net)

    rank = dist.get_rank()
    net = two_heads()
    handle = gradwire.keras.compress(net, "dense")
    together = trained(net, slice(rank, None, 2), 8)
    assert handle.stats().steps == 12
    assert np.abs(together - trained(two_heads(), slice(None), 16)).max() < 1e-6
    handle.close()

    variables = [keras.Variable(np.ones(40, "float32")) for _ in range(2)]
    optimizer = keras.optimizers.SGD(1.0, momentum=0.9)
    optimizer.build(variables)
    handle = gradwire.keras.compress(optimizer, "topk", ratio=0.05)
    for step in range(3):
        ones = keras.ops.convert_to_tensor(np.arange(40, dtype="float32") + rank)
        optimizer.apply([ones, None if rank == step % 2 else ones], variables)
    assert_same_everywhere(np.concatenate([keras.ops.convert_to_numpy(each.value) for each in variables]))
    assert keras.ops.convert_to_numpy(variables[1].value).min() < -10
    handle.close()


def test_fits_of_all_kinds(keras_pool: Pool) -> None:
    keras_pool.run(2, fits_of_all_kinds)


def trained_before() -> None:
    """Steps that the model took alone, and were compiled then, are followed by averaged ones of the same shapes."""
    import gradwire.keras

    inputs, labels = own(64, 32)
    net = model()
    for _ in range(3):
        net.train_on_batch(inputs[:16], labels[:16])
    handle = gradwire.keras.compress(net, "topk", ratio=0.1)
    for _ in range(2):
        net.train_on_batch(inputs[:16], labels[:16])
    assert handle.stats().steps == 2
    fit(net, inputs, labels, batch=16)
    assert handle.stats().steps == 4
    assert_same_everywhere(flat(net))
    handle.close()


def test_a_model_that_was_trained_before(keras_pool: Pool) -> None:
    keras_pool.run(2, trained_before)


def steps_of_some_variables() -> None:
    """What a method owes to variables that a step leaves out waits for the next step that has them."""
    import keras

    import gradwire.keras

    noise = np.random.default_rng(dist.get_rank())
    variables = [keras.Variable(np.zeros((40, 40), "float32")) for _ in range(2)]
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build(variables)
    handle = gradwire.keras.compress(optimizer, "topk", ratio=0.05)
    seen = np.zeros((2, 40, 40), "float32")
    for step in range(4):
        chosen = [1, 0][step % 2 :]
        given = noise.normal(size=(len(chosen), 40, 40)).astype("float32")
        seen[chosen] += given
        optimizer.apply([keras.ops.convert_to_tensor(each) for each in given], [variables[each] for each in chosen])
    residual = handle.state_dict()["tensors"]["residual"]
    sent = torch.from_numpy(seen) - torch.stack([residual[name] for name in handle.cells])
    dist.all_reduce(sent)
    stepped = np.stack([keras.ops.convert_to_numpy(each.value) for each in variables])
    assert np.abs(sent.numpy() / 2 + stepped).max() < 1e-5
    handle.close()


def test_steps_of_some_variables(keras_pool: Pool) -> None:
    keras_pool.run(2, steps_of_some_variables)


def scaled_losses() -> None:
    """A fixed scale of the loss is no part of what is compressed, so thresholds mean what they say."""
    import keras

    import gradwire.keras

    left = []
    for scale in (None, 1024.0):
        variable = keras.Variable(np.zeros((40, 40), "float32"))
        optimizer = keras.optimizers.SGD(1.0, loss_scale_factor=scale)
        optimizer.build([variable])
        handle = gradwire.keras.compress(optimizer, "threshold", threshold=1.0)
        given = np.random.default_rng(dist.get_rank()).normal(size=(40, 40)).astype("float32")
        optimizer.apply([keras.ops.convert_to_tensor(given * (scale or 1))], [variable])
        left.append(keras.ops.convert_to_numpy(variable.value))
        handle.close()
    assert np.array_equal(*left)
    assert np.count_nonzero(left[0]) < 1600


def test_a_scale_of_the_loss_is_taken_off(keras_pool: Pool) -> None:
    keras_pool.run(2, scaled_losses)


def misused() -> None:
    import keras

    import gradwire.keras

    def refused(target: Any, message: str, **options: Any) -> None:
        with pytest.raises(ConfigurationError, match=message):
            gradwire.keras.compress(target, "topk", **options)

    refused(model(compiled=False), r"the model is not compiled and built; give a model after model\.compile")
    refused("adam", r"target is 'adam'; give a model")
    refused(keras.optimizers.SGD(), r"the optimizer is not built; call optimizer\.build")
    refused(model(), r"ratio=3 is out of range", ratio=3)
    refused(model(), r"grad_scaler is torch's own; leave it out", grad_scaler=torch.amp.GradScaler("cpu"))
    net = model(compiled=False)
    net.compile(keras.optimizers.SGD(gradient_accumulation_steps=2), "mse")
    refused(net, r"gradient_accumulation_steps is set.*leave it out, and give fit a larger batch_size")
    net = model(compiled=False)
    if dist.get_rank():
        net.add(keras.layers.Dense(3))
    net.compile("sgd", "mse")
    refused(net, r"ranks differ: rank 0 has 'nothing', rank 1 has 'parameter 8\.kernel")
    alike = r"%s; give every rank the same model and optimizer"
    for optimizers in (("sgd", "adam"), ("adam", "adamw")):
        net = model(compiled=False)
        net.compile(optimizers[dist.get_rank()], "mse")
        refused(net, alike % r"rank 0 has '(SGD|Adam)', rank 1 has 'Adam(W?)'")
        refused(net.optimizer, alike % r"rank 0 has '(SGD|Adam)', rank 1 has 'Adam(W?)'")
    for normalised in (False, True):  # and what is trained looks alike
        inner = [keras.layers.Dense(6) for _ in range(3)]
        if normalised:
            inner.insert(dist.get_rank(), keras.layers.BatchNormalization(scale=False, center=False))
        else:
            inner[dist.get_rank()].trainable = False
        net = keras.Sequential([keras.Input((6,)), *inner])
        net.compile("sgd", "mse")
        refused(net, alike % r"rank 0 has 'array \d of shape .* rank 1 has 'array \d of shape .*")
    if keras.backend.backend() != "jax":
        refused(model(jit_compile=True), r"jit_compile is True.*give model\.compile\(\.\.\., jit_compile=False\)")
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
            inside = model()
            refused(inside, r"MirroredStrategy of tf\.distribute averages by itself; leave it out")
        refused(inside, r"MirroredStrategy of tf\.distribute averages by itself; leave it out")
    if keras.backend.backend() == "jax":
        net = model()
        with keras.distribution.DataParallel(devices=["cpu:0"]).scope():
            refused(net, r"keras\.distribution averages by itself; leave it out, and start a process for each worker")
    with pytest.raises(ConfigurationError, match=r"has other values on rank 1 than on rank 0.*broadcast rank 0's"):
        gradwire.keras.compress(model(seed=1 + dist.get_rank()), "topk", broadcast=False)

    net = model()
    handle = gradwire.keras.compress(net, "topk")
    changed = [(net, "jit_compile", True), (net.optimizer, "gradient_accumulation_steps", 2)]
    for owner, name, value in changed[keras.backend.backend() == "jax" :]:
        before = getattr(owner, name)
        if dist.get_rank():
            setattr(owner, name, value)
        with pytest.raises(ConfigurationError, match=rf"{name} is .*; (leave it out, and )?give"):
            fit(net, *own(64, 32), batch=16)
        setattr(owner, name, before)
    if keras.backend.backend() == "tensorflow":
        with (
            tf.distribute.OneDeviceStrategy("CPU:0").scope(),
            pytest.raises(ConfigurationError, match=r"OneDeviceStrategy of tf\.distribute averages by itself"),
        ):
            fit(net, *own(64, 32), batch=16)
    refused(net, r"has a method of gradwire's already; close its handle first")
    with pytest.raises(ConfigurationError, match=r"would give the model another optimizer.*compress again"):
        net.compile("adam", "mse")
    net.compile(net.optimizer, net.loss)
    fit(net, *own(64, 32), batch=16)
    assert handle.stats().steps == 2
    data = own(64, 32)
    for callback in (keras.callbacks.EarlyStopping("loss"), keras.callbacks.ReduceLROnPlateau("loss")):
        with pytest.raises(
            ConfigurationError, match=r"looks at this rank's metrics alone.*put gradwire\.keras\.Average"
        ):
            fit(net, *data, batch=16, callbacks=[callback, gradwire.keras.AverageMetrics()])
        with pytest.raises(ConfigurationError, match=r"looks at this rank's metrics alone"):  # on all ranks
            fit(net, *data, batch=16, callbacks=[callback] * dist.get_rank())
    with pytest.raises(ConfigurationError, match=r"rank 0 has 'AverageMetrics among callbacks: False'.*give it"):
        fit(net, *data, batch=16, callbacks=[gradwire.keras.AverageMetrics()] * dist.get_rank())
    with pytest.raises(ConfigurationError, match=r"TerminateOnNaN ends one rank's training and not the others'"):
        fit(net, *data, batch=16, callbacks=[gradwire.keras.AverageMetrics(), keras.callbacks.TerminateOnNaN()])
    if keras.backend.backend() != "jax":
        with pytest.raises(ConfigurationError, match=r"jit_compile is True, and what is compiled for .* cannot call"):
            net.compile(net.optimizer, net.loss, jit_compile=True)
    handle.close()
    net.compile("adam", net.loss)
    fit(net, *own(64, 32), batch=16)
    assert handle.stats().steps == 2

    class Passing(keras.Sequential):  # type: ignore[misc]
        def fit(self, *args: Any, **options: Any) -> Any:
            return super().fit(*args, **options)

    net = Passing([keras.Input((6,)), keras.layers.Dense(1)])
    net.compile("sgd", "mse")
    handle = gradwire.keras.compress(net, "topk")
    with pytest.raises(ConfigurationError, match=r"looks at this rank's metrics alone"):
        fit(net, np.ones((4, 6)), np.ones(4), batch=2, callbacks=keras.callbacks.EarlyStopping("loss"))
    with pytest.raises(ConfigurationError, match=r"rank 0 has 'steps=2', rank 1 has 'steps=1'"):
        fit(net, np.ones((4, 6)), np.ones(4), batch=2 + 2 * dist.get_rank())
    handle.close()


def test_misuse_is_told(keras_pool: Pool) -> None:
    keras_pool.run(2, misused)


WITHOUT_GRADWIRE = """
import sys
sys.modules["gradwire"] = None
import keras, numpy
net = keras.models.load_model(sys.argv[1])
print(float(numpy.abs(net.predict(numpy.ones((2, 8, 8, 1), "float32"), verbose=0)).sum()))
net.fit(numpy.ones((4, 8, 8, 1), "float32"), numpy.arange(4), verbose=0)
"""


def saved_model(path: str) -> None:
    import gradwire.keras

    net = model()
    handle = gradwire.keras.compress(net, "topk", ratio=0.1)
    fit(net, *own(64, 32), batch=16)
    if dist.get_rank() == 0:
        net.save(path)
        command = [sys.executable, "-c", WITHOUT_GRADWIRE, path]
        said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
        ours = np.abs(net.predict(np.ones((2, 8, 8, 1), "float32"), verbose=0)).sum()
        assert float(said) == pytest.approx(float(ours), rel=1e-6)
    dist.barrier()
    handle.close()


def test_a_saved_model_needs_no_gradwire(keras_pool: Pool, tmp_path: Path) -> None:
    keras_pool.run(2, saved_model, str(tmp_path / "model.keras"))


def kinds_of_models() -> None:
    """A step of one's own with two optimizers, layers that are frozen, embeddings, weights of half precision."""
    import keras

    import gradwire.keras

    rank, backend = dist.get_rank(), keras.backend.backend()
    inputs = np.random.default_rng(rank).integers(50, size=(32, 6))
    labels = np.float32(inputs.sum(1) > 150)
    for policy in ("float32", "bfloat16", "mixed_bfloat16"):
        keras.utils.set_random_seed(1 + rank)
        layers = [keras.Input((6,)), keras.layers.Embedding(50, 8, dtype=policy), keras.layers.Flatten()]
        net = keras.Sequential([*layers, keras.layers.Dense(9, dtype=policy), keras.layers.Dense(1, dtype=policy)])
        # Keras itself cannot freeze layers of which it has moving averages
        net.compile(keras.optimizers.Adam(0.01, clipnorm=1.0, use_ema=backend == "jax", weight_decay=0.01), "mse")
        handle = gradwire.keras.compress(net, "topk", ratio=0.1)
        fit(net, inputs, labels, batch=8)
        net.layers[2].trainable = False
        frozen = np.array(net.layers[2].get_weights()[0], "float32")
        if backend == "jax":  # Keras' own JAX trainer wants an optimizer of the variables that are trained
            handle.close()
            net.compile(keras.optimizers.Adam(0.01), "mse")
            handle = gradwire.keras.compress(net, "topk", ratio=0.1)
        else:
            net.compile(net.optimizer, "mse")
        fit(net, inputs, labels, batch=8)
        assert np.allclose(frozen, np.array(net.layers[2].get_weights()[0], "float32"), rtol=0.01)
        assert_same_everywhere(np.concatenate([np.float32(each).reshape(-1) for each in net.get_weights()]))
        assert handle.stats().steps == (4 if backend == "jax" else 8)
        handle.close()

    class Other(keras.Sequential):  # type: ignore[misc]
        def train_step(self, *given: Any) -> Any:
            logs = {"loss": keras.ops.zeros(())}
            return (logs, given[0]) if backend == "jax" else logs

    net = Other([keras.Input((6,)), keras.layers.Dense(1)])
    net.compile("sgd", "mse")
    handle = gradwire.keras.compress(net, "topk", ratio=0.1)
    with pytest.raises(ConfigurationError, match=r"fit did not use model\.optimizer, so nothing was averaged"):
        fit(net, np.float32(inputs), labels, batch=8)
    handle.close()
    net = keras.Sequential([keras.Input((6,)), keras.layers.Flatten()])
    net.compile("sgd", "mse")
    with pytest.raises(ConfigurationError, match="there are no parameters that require gradients"):
        gradwire.keras.compress(net, "topk")


def test_kinds_of_models(keras_pool: Pool) -> None:
    keras_pool.run(2, kinds_of_models)


def changed_between_fits() -> None:
    """An optimizer put in another's place is told, and layers that are frozen on one rank; no epoch is no fault."""
    import keras

    import gradwire.keras

    net, (inputs, labels) = model(), own(64, 32)
    handle = gradwire.keras.compress(net, "dense")
    assert not fit(net, inputs, labels, batch=16, epochs=3, initial_epoch=3).epoch
    fit(net, inputs, labels, batch=16)
    attached = net.optimizer
    net.optimizer = keras.optimizers.Adam()
    with pytest.raises(ConfigurationError, match=r"model\.optimizer is now another, Adam, .*compress again; or keep"):
        fit(net, inputs, labels, batch=16)
    net.optimizer = attached
    net.layers[0].trainable = dist.get_rank() == 0
    with pytest.raises(
        ConfigurationError, match=r"rank 0 has 'array 0 .*, to be .*rank 1 has 'array 0 .*, not to be .*freeze or"
    ):
        fit(net, inputs, labels, batch=16)
    net.layers[0].trainable = True
    fit(net, inputs, labels, batch=16)
    assert handle.stats().steps == 4
    assert_same_everywhere(flat(net))
    handle.close()


def test_what_changes_between_fits(keras_pool: Pool) -> None:
    keras_pool.run(2, changed_between_fits)
