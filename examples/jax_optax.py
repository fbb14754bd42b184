"""JAX and optax with compressed averages: the average is the first of a chain of transformations.

pip install 'gradwire[jax]'
torchrun --nproc-per-node 2 examples/jax_optax.py
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch.distributed as dist

import gradwire.jax


def patterns(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Images of 64 pixels, each one of ten patterns under twice as much noise, and which it is."""
    chance = np.random.default_rng(0)
    classes = chance.integers(10, size=count)
    images = chance.normal(size=(10, 64))[classes] + chance.normal(0, 2, (count, 64))
    return images.astype("float32"), classes


def scores(params: dict[str, Any], inputs: Any) -> Any:
    """A small network."""
    return jax.nn.relu(inputs @ params["first"] + params["bias"]) @ params["second"]


def loss_of(params: dict[str, Any], inputs: Any, classes: Any) -> Any:
    """The mean cross entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(scores(params, inputs), classes).mean()


def main() -> None:
    """Trains on noisy patterns; rank 0 says how it went."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", default="acpsgd", help="a name of gradwire methods")
    parser.add_argument("--steps", type=int, default=300)
    choices = parser.parse_args()

    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()
    images, labels = patterns(2000)

    keys = jax.random.split(jax.random.key(0))  # the same on all ranks, and so are the parameters
    params = {"first": 0.1 * jax.random.normal(keys[0], (64, 256)), "bias": jnp.zeros(256)}
    params["second"] = 0.1 * jax.random.normal(keys[1], (256, 10))
    sync = gradwire.jax.Synchronizer(params, choices.method)
    optimizer = optax.chain(sync.transformation(), optax.adam(3e-3))
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any, inputs: Any, classes: Any) -> tuple[Any, Any, Any]:
        loss, gradients = jax.value_and_grad(loss_of)(params, inputs, classes)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    noise = np.random.default_rng(1 + rank)
    for number in range(choices.steps):
        mine = noise.integers(1500, size=64 // workers)
        params, state, loss = step(params, state, images[mine], labels[mine])
        if rank == 0 and (number + 1) % 50 == 0:
            print(f"step {number + 1} loss {loss:.4f}: {sync.stats()}", flush=True)
    if rank == 0:
        right = np.argmax(scores(params, images[1500:]), axis=1) == labels[1500:]
        print(f"accuracy {right.mean():.3f}; {sync.stats()}")
    jax.block_until_ready(params)
    sync.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
