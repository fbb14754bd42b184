"""Keras: local steps within ``fit``, averaged from time to time as torch's own way in averages them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from arrays import SHAPES, gradients
from keras_models import assert_same_everywhere, fit, flat, model, own
from local_steps import PLANS, by_torch, nesterov, start

from gradwire import ConfigurationError
from pool import Pool


def every_plan() -> None:
    """An optimizer in a loop of one's own."""
    import keras

    import gradwire.keras

    rank, convert = dist.get_rank(), keras.ops.convert_to_numpy
    for plan in PLANS:
        variables = [
            keras.Variable(value, name=each.replace("/", "_")) for each, value in zip(SHAPES, start(), strict=True)
        ]
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build(variables)
        handle = gradwire.keras.periodic(optimizer, **plan)
        names = list(dict.fromkeys(piece.partition("[")[0] for piece in handle.averaged.shapes))
        expected, counted = by_torch(names, rank, 9, **plan)
        for step in range(9):
            optimizer.apply([keras.ops.convert_to_tensor(each) for each in gradients(rank, step)], variables)
            handle.step()
            for variable, wanted in zip(variables, expected[step], strict=True):
                assert np.array_equal(convert(variable.value), wanted), (plan, step, variable.path)
        handle.synchronize()
        for variable, wanted in zip(variables, expected[-1], strict=True):
            assert np.array_equal(convert(variable.value), wanted), (plan, variable.path)
        assert (handle.stats().wire_bytes, handle.stats().steps, handle.syncs) == counted
        handle.close()


def test_every_plan_averages_as_with_torch(keras_pool: Pool) -> None:
    keras_pool.run(2, every_plan)


def weights(net: Any) -> list[np.ndarray[Any, Any]]:
    return [np.array(each) for each in net.get_weights()]


def by_hand(shares: list[tuple[Any, Any]], every: int, periods: int, batch: int, outer: bool) -> Any:
    """The same in one process: every worker's own model, then an average of what they became."""
    nets = [model() for _ in shares]
    anchors = [torch.from_numpy(each) for each in weights(nets[0])]
    optimizer = nesterov(anchors) if outer else torch.optim.SGD(anchors, lr=1.0)
    for period in range(periods):
        part = slice(period * every * batch, (period + 1) * every * batch)
        for net, (inputs, labels) in zip(nets, shares, strict=True):
            fit(net, inputs[part], labels[part], batch=batch)
        for place, anchor in enumerate(anchors):
            anchor.grad = anchor - torch.from_numpy(np.mean([weights(net)[place] for net in nets], axis=0))
        optimizer.step()
        for net in nets:
            net.set_weights([each.numpy() for each in anchors])
    return np.concatenate([each.numpy().reshape(-1) for each in anchors])


def fits(options: dict[str, Any]) -> None:
    import gradwire.keras

    workers = dist.get_world_size()
    inputs, labels = own(192, 16)
    shares: list[Any] = [None] * workers
    dist.all_gather_object(shares, (inputs, labels))
    for outer in (False, True):
        net = model(seed=1 + dist.get_rank(), **options)  # rank 0's weights are broadcast
        handle = gradwire.keras.periodic(net, every=3, outer=nesterov if outer else None)
        fit(net, inputs[: len(inputs) // 2], labels[: len(inputs) // 2], batch=16 // workers)
        fit(net, inputs[len(inputs) // 2 :], labels[len(inputs) // 2 :], batch=16 // workers)
        assert (handle.stats().steps, handle.syncs) == (12, 4)
        assert_same_everywhere(flat(net))
        assert np.abs(flat(net) - by_hand(shares, 3, 4, 16 // workers, outer)).max() < 1e-6
        net.train_on_batch(inputs[:8], labels[:8])
        assert handle.steps_done == 13
        handle.close()
        fit(net, inputs, labels, batch=16)
        assert handle.steps_done == 13


@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}], ids=["compiled", "eager"])
def test_fit_is_an_average_of_what_each_became(keras_pool: Pool, options: dict[str, Any]) -> None:
    keras_pool.run(2, fits, options)


def goes_on(folder: str) -> None:
    """From the middle of a period, where ranks differ."""
    import gradwire.keras

    plan: dict[str, Any] = {"every": 4, "method": "topk", "ratio": 0.05, "outer": nesterov, "moments": "average"}
    data = own(160, 32)
    net = model()
    handle = gradwire.keras.periodic(net, **plan)
    fit(net, *data, batch=16)
    handle.save(folder)
    fit(net, *data, batch=16)
    handle.close()

    again = model(seed=5)
    resumed = gradwire.keras.periodic(again, **plan)
    resumed.load(folder)
    fit(again, *data, batch=16)
    assert (resumed.steps_done, resumed.syncs) == (10, 2)
    assert np.array_equal(flat(net), flat(again))
    resumed.synchronize()
    assert_same_everywhere(flat(again))
    resumed.close()


def test_a_run_that_goes_on_gives_the_same_bits(keras_pool: Pool, tmp_path: Path) -> None:
    keras_pool.run(2, goes_on, str(tmp_path))


def beside() -> None:
    """Moments and statistics of batch normalisation are averaged with the weights, and zeroed or left where told."""
    import keras

    import gradwire.keras

    rank = dist.get_rank()
    keras.utils.set_random_seed(rank)
    net = keras.Sequential([keras.Input((6,)), keras.layers.Dense(7), keras.layers.BatchNormalization()])
    net.compile(keras.optimizers.Adam(0.01), "mse")
    handle = gradwire.keras.periodic(net, every=2, moments="average", buffers=True)
    inputs = np.random.default_rng(rank).normal(size=(64, 6)).astype("float32")
    fit(net, inputs, inputs.sum(1, keepdims=True) * np.ones((1, 7), "float32"), batch=16)
    kept = [keras.ops.convert_to_numpy(each.value) for each in [*net.weights, *net.optimizer.variables]]
    assert len(kept) > 12
    assert_same_everywhere(np.concatenate([np.float64(each).reshape(-1) for each in kept]))
    handle.close()

    handle = gradwire.keras.periodic(net, every=2)
    before = weights(net)
    bad = inputs[:32].copy()
    bad[0] = np.inf if rank else 1
    fit(net, bad, np.ones((32, 7), "float32"), batch=16)
    assert handle.dropped == 1
    for old, variable in zip(before, net.weights, strict=True):
        new = keras.ops.convert_to_numpy(variable.value)
        assert not variable.trainable or np.array_equal(old, new)
    assert all(np.isfinite(keras.ops.convert_to_numpy(each.value)).all() for each in net.optimizer.variables)
    handle.close()


def test_what_goes_along(keras_pool: Pool) -> None:
    keras_pool.run(2, beside)


def misused() -> None:
    import keras

    import gradwire.keras

    def refused(target: Any, message: str, **options: Any) -> None:
        with pytest.raises(ConfigurationError, match=message):
            gradwire.keras.periodic(target, **options)

    refused(model(compiled=False), r"the model is not compiled and built")
    refused(keras.optimizers.SGD(), r"the optimizer is not built; call optimizer\.build")
    refused(model(), r"every=0 is out of range", every=0)
    refused(model(), r"moments='reset' is torch's.*choose 'keep' or 'average'", moments="reset")
    refused(model(), r"outer is a str; give an optimizer", outer="sgd")
    refused(model(seed=1 + dist.get_rank()), r"has other values on rank 1 than on rank 0", broadcast=False)
    net = model(compiled=False)
    net.compile(keras.optimizers.SGD(use_ema=True), "mse")
    refused(net, r"use_ema at last replaces weights by moving averages.*choose moments='average'")
    net = model()
    handle = gradwire.keras.periodic(net, every=2)
    refused(net, r"has a method of gradwire's already; close its handle first")
    with pytest.raises(ConfigurationError, match=r"would give the model another optimizer.*compress again"):
        net.compile("adam", "mse")
    net.compile(net.optimizer, net.loss, steps_per_execution=4)
    with pytest.raises(ConfigurationError, match=r"steps_per_execution=4, and weights are averaged between two exec"):
        fit(net, *own(64, 32), batch=16)
    net.compile(net.optimizer, net.loss)
    fit(net, *own(64, 32), batch=16)
    assert handle.syncs == 1
    handle.close()


def test_misuse_is_told(keras_pool: Pool) -> None:
    keras_pool.run(2, misused)
