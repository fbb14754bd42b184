"""The same arrays averaged from TensorFlow's and from JAX' own loops, by one name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from arrays import gradients

Arrays = list[np.ndarray[Any, Any]]
Average = Callable[[Sequence[Any]], Arrays]

FRAMEWORKS = ("tensorflow", "jax")


def attached(framework: str, method: str, arrays: Sequence[Any] = (), **options: Any) -> tuple[Any, Average]:
    """A synchronizer of arrays, and what averages numpy's by it in a graph or under ``jit``."""
    given = list(arrays) or gradients(0, 9)
    if framework == "tensorflow":
        import tensorflow as tf

        import gradwire.tensorflow

        sync: Any = gradwire.tensorflow.Synchronizer([tf.Variable(each) for each in given], method, **options)
        in_graph = tf.function(sync.average)
        return sync, lambda values: [each.numpy() for each in in_graph([tf.constant(each) for each in values])]
    import jax

    import gradwire.jax

    sync = gradwire.jax.Synchronizer(given, method, **options)
    compiled = jax.jit(sync.average)
    return sync, lambda values: [np.asarray(each) for each in compiled(list(values))]


def broadcast(framework: str, arrays: Sequence[Any]) -> None:
    """Gives all ranks rank 0's arrays."""
    if framework == "tensorflow":
        import tensorflow as tf

        import gradwire.tensorflow

        gradwire.tensorflow.broadcast([tf.Variable(each) for each in arrays])
    else:
        import gradwire.jax

        gradwire.jax.broadcast(list(arrays))
