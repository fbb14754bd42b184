"""Nothing is copied but once into the bucket: gradients and averages are where the framework has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from arrays import SHAPES, gradients

from gradwire.attach.array_synchronizer import Rooms
from pool import Pool


def on_tensorflow() -> None:
    """TensorFlow takes the averages where they lie, and gives gradients where they lie; room is used again."""
    import tensorflow as tf

    import gradwire.tensorflow

    def address(tensor: Any) -> int:
        return torch.utils.dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(tensor)).data_ptr()

    arrays = [shape for shape in SHAPES.values() if shape]  # of scalars numpy has no memory
    zeros = [tf.Variable(tf.zeros(shape)) for shape in arrays]
    sync = gradwire.tensorflow.Synchronizer(zeros, "topk", ratio=0.05)
    on_host, seen, rooms = Rooms.average, [], set[Rooms]()

    def watched(room: Rooms, handle: Any, given: dict[str, Any], taken: list[str]) -> list[Any]:
        averages = on_host(room, handle, given, taken)
        seen[:] = [[each.ctypes.data for each in side] for side in (given.values(), averages)]
        rooms.add(room)
        return averages

    Rooms.average = watched  # type: ignore[method-assign]
    average = tf.function(sync.average)
    for _ in range(5):
        given = [tf.random.normal(shape) for shape in arrays]
        averages = average(given)
        assert [[address(each) for each in tensors] for tensors in (given, averages)] == seen
    assert [len(each._rooms) for each in rooms] == [2]  # the last averages are still there when the next are made
    kept = [each.numpy().copy() for each in averages]
    average(given)
    assert all(np.array_equal(each.numpy(), copy) for each, copy in zip(averages, kept, strict=True))
    Rooms.average = on_host  # type: ignore[method-assign]
    sync.close()


def test_tensorflow(tensorflow_pool: Pool) -> None:
    tensorflow_pool.run(2, on_tensorflow)


def on_jax() -> None:
    """Gradients are read where XLA has them, and its own buckets are averaged in place."""
    import jax

    import gradwire.jax

    sync = gradwire.jax.Synchronizer(gradients(0, 9), "topk", ratio=0.05)
    average_arrays, views_of, seen, traced = sync.average_arrays, sync.views, [], []

    def watched(buffers: list[torch.Tensor], given: dict[str, torch.Tensor], *others: Any) -> Any:
        seen[:] = [each.data_ptr() for each in (*given.values(), *buffers)]
        return average_arrays(buffers, given, *others)

    def views(flats: list[Any]) -> Any:
        traced[:] = flats
        return views_of(flats)

    sync.average_arrays, sync.views = watched, views  # type: ignore[method-assign,assignment]
    average = jax.jit(lambda values: (sync.average(values), list(traced)))
    for step in range(3):
        given = [jax.numpy.asarray(each) for each in gradients(0, step)]
        averages, buckets = jax.block_until_ready(average(given))
        assert [each.unsafe_buffer_pointer() for each in (*given, *buckets)] == seen
        assert np.array_equal(averages[0].reshape(-1), views_of(buckets)["0"].reshape(-1))
    assert len(buckets) == 1
    sync.close()


def test_jax(jax_pool: Pool) -> None:
    jax_pool.run(2, on_jax)
