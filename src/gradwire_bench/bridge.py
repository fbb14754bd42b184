"""What it takes to average a ResNet-50's gradients from TensorFlow and JAX, beside torch's own way in.

torchrun --nproc-per-node 2 -m gradwire_bench.bridge
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf
import torch
import torch.distributed as dist
from jax.experimental.buffer_callback import buffer_callback
from torch.utils.dlpack import from_dlpack

import gradwire.jax
import gradwire.tensorflow
from gradwire.attach.array_synchronizer import ArraySynchronizer, Rooms
from gradwire.layout import as_matrix
from gradwire_bench import shapes

Average = Callable[[], Any]
METHODS: dict[str, dict[str, Any]] = {"dense": {}, "topk": {"ratio": 0.01}, "acpsgd": {"rank": 4}}


def least_ms(average: Average, rounds: int) -> float:
    """The shortest of some calls, in milliseconds; all ranks begin together."""
    found = []
    for _ in range(rounds + 2):
        dist.barrier()
        begun = time.perf_counter()
        average()
        found.append(1e3 * (time.perf_counter() - begun))
    return min(found[2:])


def by_torch(values: list[Any], method: str) -> tuple[gradwire.Handle, Average]:
    """Of gradients in torch's own memory."""
    tensors = {str(place): torch.from_numpy(each).view(as_matrix(each.shape)) for place, each in enumerate(values)}
    named = [(name, torch.nn.Parameter(torch.zeros_like(each))) for name, each in tensors.items()]
    sync = gradwire.Synchronizer(named, method, **METHODS[method])
    return sync, lambda: sync.average(tensors)


def by_tensorflow(values: list[Any], method: str) -> tuple[ArraySynchronizer, Average]:
    """Within a ``tf.function``."""
    given = [tf.constant(each) for each in values]
    variables = [tf.Variable(tf.zeros_like(each)) for each in given]
    sync = gradwire.tensorflow.Synchronizer(variables, method, **METHODS[method])
    function = tf.function(sync.average, autograph=False)
    return sync, lambda: function(given)


def by_jax(values: list[Any], method: str) -> tuple[ArraySynchronizer, Average]:
    """Within ``jax.jit``."""
    given = [jnp.asarray(each) for each in values]
    sync = gradwire.jax.Synchronizer([jnp.zeros_like(each) for each in given], method, **METHODS[method])
    function = jax.jit(sync.average)
    return sync, lambda: jax.block_until_ready(function(given))


def empty_callbacks(values: list[Any], rounds: int) -> Iterator[tuple[str, float, str]]:
    """Into a callback that does nothing and out of it: name, milliseconds, how many stayed where they were."""
    rooms, kept = Rooms([-(-each.size // 16) * 16 for each in values]), dict[str, Any]()

    def shared(*arrays: Any) -> list[Any]:
        buffers, _ = rooms.take()
        outs = [b.numpy()[: each.size].reshape(each.shape) for b, each in zip(buffers, arrays, strict=True)]
        kept["tf"] = [[each.ctypes.data for each in side] for side in (arrays, outs)]
        return outs

    given = [tf.constant(each) for each in values]
    through = tf.function(lambda: tf.numpy_function(shared, given, [tf.float32] * len(given)), autograph=False)
    ms, outs = least_ms(through, rounds), through()

    def address(tensor: Any) -> int:
        return int(from_dlpack(tf.experimental.dlpack.to_dlpack(tensor)).data_ptr())

    pairs = zip(given, outs, *kept["tf"], strict=True)
    same = sum(address(a) == i and address(b) == o for a, b, i, o in pairs)
    yield "tf.numpy_function", ms, f"{same} of {len(values)} arrays"

    def callback(context: Any, out: Any, *arrays: Any) -> None:
        kept["jax"] = [from_dlpack(each).data_ptr() for each in (*arrays, *out)]

    arrays = [jnp.asarray(each) for each in values]
    flats = [jax.ShapeDtypeStruct((sum(each.size for each in values[part::4]),), jnp.float32) for part in range(4)]
    function = jax.jit(buffer_callback(callback, flats, has_side_effect=True))
    ms, back = least_ms(lambda: jax.block_until_ready(function(*arrays)), rounds), function(*arrays)
    held = [each.unsafe_buffer_pointer() for each in jax.block_until_ready([*arrays, *back])]
    same = sum(ours == theirs for ours, theirs in zip(held, kept["jax"], strict=True))
    yield "JAX buffer_callback", ms, f"{same} of {len(arrays)} arrays and {len(flats)} buckets"


def main() -> None:
    """Prints both tables, as rank 0 measured them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    noise = np.random.default_rng(dist.get_rank())
    values = [noise.standard_normal(shape, np.float32) for _, shape in shapes.get("resnet50")]
    first = dist.get_rank() == 0

    def say(*cells: str) -> None:
        if first:
            print("| " + " | ".join(cells) + " |", flush=True)

    say("in and out of an empty callback", "ms", "where they were")
    for name, ms, same in empty_callbacks(values, rounds):
        say(name, f"{ms:.1f}", same)
    begun = time.perf_counter()
    torch.cat([torch.from_numpy(each).view(-1) for each in values])
    say("copying all of it once", f"{1e3 * (time.perf_counter() - begun):.1f}", "")
    say("a whole average", "torch ms", "TensorFlow ms", "JAX ms", "TensorFlow / torch", "JAX / torch")
    for method in METHODS:
        found = []
        for way in (by_torch, by_tensorflow, by_jax):
            sync, average = way(values, method)
            found.append(least_ms(average, rounds))
            sync.close()
        say(method, *(f"{each:.0f}" for each in found), *(f"{each / found[0]:.2f}" for each in found[1:]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
