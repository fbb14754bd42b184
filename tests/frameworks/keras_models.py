"""Models, samples and fits that the tests of Keras share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def model(seed: int = 1, *, compiled: bool = True, **options: Any) -> Any:
    import keras

    keras.utils.set_random_seed(seed)
    layers = [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(8, 3, activation="relu"),
        keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(24, activation="relu"),
        keras.layers.Dense(5),
    ]
    net = keras.Sequential(layers)
    if compiled:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        net.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, metrics=["accuracy"], **options)
    return net


def samples(count: int) -> tuple[Any, Any]:
    noise = np.random.default_rng(5)
    return noise.normal(size=(count, 8, 8, 1)).astype("float32"), noise.integers(5, size=count)


def own(count: int, batch: int) -> tuple[Any, Any]:
    """This rank's share of every batch of all samples."""
    inputs, labels = samples(count)
    mine = np.arange(count).reshape(-1, batch)[:, dist.get_rank() :: dist.get_world_size()].reshape(-1)
    return inputs[mine], labels[mine]


def fit(net: Any, inputs: Any, labels: Any, batch: int, epochs: int = 1, **options: Any) -> Any:
    return net.fit(inputs, labels, batch_size=batch, epochs=epochs, shuffle=False, verbose=0, **options)


def flat(net: Any) -> Any:
    return np.concatenate([np.asarray(each).reshape(-1) for each in net.get_weights()])


def assert_same_everywhere(values: Any) -> None:
    mine = torch.from_numpy(np.array(values))
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    assert all(torch.equal(mine, each) for each in everyone)


def backend() -> str:
    import keras

    return str(keras.backend.backend())
