"""TensorFlow: gradients of a ``GradientTape`` are averaged, compressed, also from within a ``tf.function``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from gradwire import bridge
from gradwire.attach.elsewhere import Cell
from gradwire.bridge import LINE, Bridge, Rooms
from gradwire.engine import Methods
from gradwire.errors import ConfigurationError

try:
    import tensorflow as tf
except ImportError as error:
    raise ImportError(f"{error}; TensorFlow comes with pip install 'gradwire[tensorflow]'") from error

ALIGNMENT = LINE // 4
"""``float32`` elements at a multiple of which TensorFlow takes memory as it is."""

Function = TypeVar("Function", bound=Callable[..., Any])

# Or TensorFlow would make a graph of each line of Python here.
_as_it_is: Callable[[Function], Function] = tf.autograph.experimental.do_not_convert


class Synchronizer(Bridge):
    """Averages gradients of variables over all processes, in a ``tf.function`` or eagerly.

    To be made on every rank with the same arguments, outside of any ``tf.function``.

    Args:
        variables: ``tf.Variable`` or ``keras.Variable``, the same values on all ranks; :func:`broadcast` makes them so.
        method: As in :func:`gradwire.compress`.
        process_group: As in :class:`gradwire.Synchronizer`, and so are the options.
        **options: The other choices and the method's hyper-parameters.

    Raises:
        ConfigurationError: If anything cannot be as asked, or differs between ranks.

    Example::

        sync = gradwire.tensorflow.Synchronizer(model.trainable_variables, "topk", ratio=0.01)

        @tf.function
        def step(inputs, labels):
            with tf.GradientTape() as tape:
                loss = loss_of(model(inputs, training=True), labels)
            gradients = sync.average(tape.gradient(loss, model.trainable_variables))
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    """

    def __init__(self, variables: Sequence[Any], method: Methods, *, process_group: Any = None, **options: Any) -> None:
        self.variables = list(variables)

        def cells() -> list[Cell]:
            check_strategy()
            return _cells(self.variables)

        super().__init__(cells, method, process_group, options, alignment=ALIGNMENT)
        self.check_equal(self.cells.values())
        self.averages = Averaged(self)

    @_as_it_is
    def average(self, gradients: Sequence[Any]) -> list[Any]:
        """The averages over all workers, in the gradients' dtypes.

        To be called as often on every rank; within one ``tf.function`` in the order of the program.

        Args:
            gradients: One of each variable, in their order. ``tf.IndexedSlices`` are made dense, None counts as zero.

        Raises:
            ConfigurationError: If they are not shaped as the variables.
            tf.errors.OpError: With the text of what failed, which :attr:`failed` keeps.
        """
        averages = self.averages(self.named(gradients))
        return [averages[name] for name in self.cells]


def DistributedGradientTape(tape: Any, synchronizer: Synchronizer) -> Any:  # noqa: N802
    """Has a ``tf.GradientTape`` give gradients that are averages over all workers; named as Horovod's.

    Args:
        tape: Any tape.
        synchronizer: Of the variables that ``tape.gradient`` is asked for, some or all of them.

    Returns:
        The tape, whose ``gradient`` raises ConfigurationError for what is none of the synchronizer's variables.

    Example::

        with tf.GradientTape() as tape:
            loss = loss_of(model(inputs, training=True), labels)
        tape = gradwire.tensorflow.DistributedGradientTape(tape, sync)
        gradients = tape.gradient(loss, model.trainable_variables)
    """
    gradients_of = tape.gradient
    names = {_identity(each): name for each, name in zip(synchronizer.variables, synchronizer.cells, strict=True)}

    @_as_it_is
    def gradient(target: Any, sources: Any, *args: Any, **options: Any) -> Any:
        flat = tf.nest.flatten(sources)
        if unknown := [each for each in flat if _identity(each) not in names]:
            raise ConfigurationError(
                f"{unknown[0].name!r} is none of the synchronizer's variables; make it of all that are trained"
            )
        ours = [names[_identity(each)] for each in flat]
        gradients = zip(ours, gradients_of(target, flat, *args, **options), strict=True)
        averages = synchronizer.averages({name: each for name, each in gradients if each is not None})
        return tf.nest.pack_sequence_as(sources, [averages[name] for name in ours])

    tape.gradient = gradient
    return tape


def broadcast(variables: Sequence[Any], process_group: Any = None) -> None:
    """Gives variables the values of rank 0's; to be called on all ranks, outside of any ``tf.function``."""
    bridge.broadcast(_cells(variables), process_group)


def check_strategy(strategy: Any = None) -> None:
    """Raises ConfigurationError within a ``tf.distribute`` strategy, or for another than TensorFlow's own."""
    now = tf.distribute.get_strategy()
    if tf.distribute.has_strategy() or strategy not in (None, now):
        raise ConfigurationError(
            f"{type(strategy or now).__name__} of tf.distribute averages by itself; leave it out, and start a process "
            "for each worker, as torchrun does"
        )


class Averaged:
    """Averages in memory that TensorFlow takes as it is: gradients are copied to it once, averages lie in it.

    Args:
        handle: Whose buckets have been laid out with ``ALIGNMENT``.
    """

    def __init__(self, handle: Bridge) -> None:
        self._handle = weakref.proxy(handle)
        self._rooms = Rooms(handle.numels)

    def __call__(self, gradients: Mapping[str, Any]) -> dict[str, Any]:
        """Averages of all arrays, by name, in the dtypes of their gradients."""
        handle, given = self._handle, {name: tf.convert_to_tensor(each) for name, each in gradients.items()}
        if not given:
            raise ConfigurationError("all gradients are None: the loss depends on none of the variables")
        for name, each in given.items():
            shape = handle.cells[name].shape
            handle.check_gradient(name, shape if each.shape.is_compatible_with(shape) else each.shape, each.dtype.name)

        def call(*arrays: Any) -> list[Any]:
            return self._on_host(dict(zip(given, arrays, strict=True)))

        wide = [tf.cast(each, tf.float32) for each in given.values()]
        averages = tf.numpy_function(call, wide, [tf.float32] * len(handle.cells))
        averages = tf.nest.flatten(averages)  # a single one comes without a list
        dtypes = {name: each.dtype for name, each in given.items()}
        return {
            cell.name: tf.cast(tf.ensure_shape(average, cell.shape), dtypes.get(cell.name, cell.dtype))
            for cell, average in zip(handle.cells.values(), averages, strict=True)
        }

    def _on_host(self, given: Mapping[str, Any]) -> list[Any]:
        """Averages of all arrays, given by name."""
        buffers, lent = self._rooms.take()
        tensors = {name: torch.from_numpy(np.asarray(each)) for name, each in given.items()}
        views = self._handle.average_arrays(buffers, tensors)
        averages = [views[cell.name].numpy().reshape(cell.shape) for cell in self._handle.cells.values()]
        lent += [weakref.ref(each) for each in averages]
        return averages


def _cells(variables: Sequence[Any]) -> list[Cell]:
    return bridge.cells(variables, lambda variable: variable.numpy())


def _identity(variable: Any) -> int:
    """Of the ``tf.Variable`` that Keras' variables have inside, too."""
    return id(variable.value if hasattr(variable, "path") else variable)
