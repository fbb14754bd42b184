"""A loop of one's own in TensorFlow, with compressed averages.

pip install 'gradwire[tensorflow]'
torchrun --nproc-per-node 2 examples/tensorflow_loop.py
"""

import argparse

import numpy as np
import tensorflow as tf
import torch.distributed as dist

import gradwire.tensorflow


def patterns(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Images of 64 pixels, each one of ten patterns under twice as much noise, and which it is."""
    chance = np.random.default_rng(0)
    classes = chance.integers(10, size=count)
    images = chance.normal(size=(10, 64))[classes] + chance.normal(0, 2, (count, 64))
    return images.astype("float32"), classes


def main() -> None:
    """Trains on noisy patterns; rank 0 says how it went."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", default="acpsgd", help="a name of gradwire methods")
    parser.add_argument("--steps", type=int, default=300)
    choices = parser.parse_args()

    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()
    images, labels = patterns(2000)

    start = np.random.default_rng(0)
    shapes = {"first": (64, 256), "bias": (256,), "second": (256, 10)}
    variables = [
        tf.Variable(start.normal(0, 0.1, shape).astype("float32"), name=name) for name, shape in shapes.items()
    ]
    sync = gradwire.tensorflow.Synchronizer(variables, choices.method)

    def scores(inputs: tf.Tensor) -> tf.Tensor:
        first, bias, second = variables
        return tf.nn.relu(inputs @ first + bias) @ second

    @tf.function
    def step(inputs: tf.Tensor, classes: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(classes, scores(inputs)))
        for variable, gradient in zip(variables, sync.average(tape.gradient(loss, variables)), strict=True):
            variable.assign_sub(0.3 * gradient)
        return loss

    noise = np.random.default_rng(1 + rank)
    for number in range(choices.steps):
        mine = noise.integers(1500, size=64 // workers)
        loss = step(images[mine], labels[mine])
        if rank == 0 and (number + 1) % 50 == 0:
            print(f"step {number + 1} loss {loss:.4f}: {sync.stats()}", flush=True)
    if rank == 0:
        right = np.argmax(scores(images[1500:]), axis=1) == labels[1500:]
        print(f"accuracy {right.mean():.3f}; {sync.stats()}")
    sync.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
