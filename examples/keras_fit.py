"""Keras 3 with compressed averages, on whichever backend KERAS_BACKEND names: one line more than without.

    pip install 'gradwire[tensorflow]'
    KERAS_BACKEND=tensorflow torchrun --nproc-per-node 2 examples/keras_fit.py --folder results/keras

Started again with the same folder it goes on where it ended. KERAS_BACKEND=torch needs 'gradwire[keras]' alone, and
KERAS_BACKEND=jax 'gradwire[keras,jax]'.
"""

import argparse
from pathlib import Path

import keras
import numpy as np
import torch.distributed as dist

import gradwire.keras


def patterns(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Images of 64 pixels, each one of ten patterns under twice as much noise, and which it is."""
    chance = np.random.default_rng(0)
    classes = chance.integers(10, size=count)
    images = chance.normal(size=(10, 64))[classes] + chance.normal(0, 2, (count, 64))
    return images.astype("float32"), classes


def model() -> keras.Model:
    """A small network for images of 8 by 8 pixels."""
    layers = [keras.Input((8, 8, 1)), keras.layers.Conv2D(32, 3, activation="relu"), keras.layers.Flatten()]
    layers += [keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10, activation="softmax")]
    made = keras.Sequential(layers)
    made.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return made


def main() -> None:
    """Trains on noisy patterns; rank 0 says how it went."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--method", default="acpsgd", help="a name of gradwire methods")
    parser.add_argument("--epochs", type=int, default=5)
    choices = parser.parse_args()

    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()
    images, labels = patterns(2000)
    images = images.reshape(-1, 8, 8, 1)
    mine = slice(rank, 1500 // workers * workers, workers)  # as many on every rank

    saved = choices.folder / "model.keras"
    net = keras.models.load_model(saved) if saved.exists() else model()
    handle = gradwire.keras.compress(net, choices.method)
    if saved.exists():
        handle.load(choices.folder)
    callbacks = [gradwire.keras.AverageMetrics()]
    net.fit(images[mine], labels[mine], batch_size=64 // workers, epochs=choices.epochs, callbacks=callbacks, verbose=0)
    handle.save(choices.folder)
    if rank == 0:
        net.save(saved)
        _, accuracy = net.evaluate(images[1500:], labels[1500:], verbose=0)
        print(f"{keras.backend.backend()}: accuracy {accuracy:.3f}; {handle.stats()}", flush=True)
    dist.barrier()
    handle.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
