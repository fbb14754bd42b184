"""Keras 3 with compressed averages, on whichever backend KERAS_BACKEND names: one line more than without.

    pip install 'gradwire[keras,bench]' tensorflow-cpu
    KERAS_BACKEND=tensorflow torchrun --nproc-per-node 2 examples/keras_fit.py --folder results/keras

Started again with the same folder it goes on where it ended.
"""

import argparse
from pathlib import Path

import keras
import torch.distributed as dist
from sklearn.datasets import load_digits

import gradwire.keras


def model() -> keras.Model:
    """A small network for images of 8 by 8 pixels."""
    layers = [keras.Input((8, 8, 1)), keras.layers.Conv2D(32, 3, activation="relu"), keras.layers.Flatten()]
    layers += [keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10, activation="softmax")]
    made = keras.Sequential(layers)
    made.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return made


def main() -> None:
    """Trains on handwritten digits; rank 0 says how it went."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--method", default="acpsgd", help="a name of gradwire methods")
    parser.add_argument("--epochs", type=int, default=5)
    choices = parser.parse_args()

    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
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
