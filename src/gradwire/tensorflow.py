"""TensorFlow: gradients of a ``GradientTape`` are averaged, compressed, also from within a ``tf.function``."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradwire import bridge
from gradwire.attach.elsewhere import Described
from gradwire.bridge import LINE, Bridge, Rooms
from gradwire.engine import Methods
from gradwire.errors import ConfigurationError

try:
    import tensorflow as tf
except ImportError as error:
    raise ImportError(f"{error}; TensorFlow comes with pip install 'gradwire[tensorflow]'") from error

ALIGNMENT = LINE // 4
"""``float32`` elements at a multiple of which TensorFlow takes memory as it is."""


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

        def arrays() -> list[Described]:
            check_strategy()
            named = zip(bridge.names(self.variables), self.variables, strict=True)
            return [Described(name, tuple(each.shape), tf.as_dtype(each.dtype).name) for name, each in named]

        super().__init__(arrays, method, process_group, options, alignment=ALIGNMENT)
        values = zip(self.arrays, self.variables, strict=True)
        self.check_equal((each.name, np.array(variable.numpy())) for each, variable in values)
        self._average = Averaged(self)

    def average(self, gradients: Sequence[Any]) -> list[Any]:
        """The averages over all workers, in the gradients' dtypes.

        To be called as often on every rank; within one ``tf.function`` in the order of the program.

        Args:
            gradients: One of each variable, in their order. ``tf.IndexedSlices`` are made dense. None counts as zero
                and comes back as None, so it must be None on all ranks.

        Raises:
            ConfigurationError: If they are not shaped as the variables.
            tf.errors.OpError: With the text of what failed, which :attr:`failed` keeps.
        """
        if len(gradients) != len(self.arrays):
            raise ConfigurationError(
                f"there are {len(gradients)} gradients and {len(self.arrays)} variables; give one of each variable, in "
                "the order in which the synchronizer was given them"
            )
        return self._average(gradients)


class DistributedGradientTape:
    """A ``tf.GradientTape`` whose gradients are averages over all workers.

    Args:
        tape: Any tape; all that is not here is its own.
        synchronizer: Of the variables that :meth:`gradient` is asked for, some or all of them.

    Example::

        with tf.GradientTape() as tape:
            loss = loss_of(model(inputs, training=True), labels)
        tape = gradwire.tensorflow.DistributedGradientTape(tape, sync)
        gradients = tape.gradient(loss, model.trainable_variables)
    """

    def __init__(self, tape: Any, synchronizer: Synchronizer) -> None:
        self._tape = tape
        self._synchronizer = synchronizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._tape.__exit__(*raised)

    def gradient(self, target: Any, sources: Sequence[Any], **options: Any) -> list[Any]:
        """Averages of the gradients, in the order of ``sources``.

        Raises:
            ConfigurationError: If a source is not one of the synchronizer's variables.
        """
        own = {_identity(each): place for place, each in enumerate(self._synchronizer.variables)}
        if unknown := [each for each in sources if _identity(each) not in own]:
            raise ConfigurationError(
                f"{unknown[0].name!r} is none of the synchronizer's variables; make it of all that are trained"
            )
        gradients: list[Any] = [None] * len(own)
        for source, gradient in zip(sources, self._tape.gradient(target, list(sources), **options), strict=True):
            gradients[own[_identity(source)]] = gradient
        averages = self._synchronizer.average(gradients)
        return [averages[own[_identity(source)]] for source in sources]


def broadcast(variables: Sequence[Any], process_group: Any = None) -> None:
    """Gives variables the values of rank 0's; to be called on all ranks, outside of any ``tf.function``."""
    values = [np.array(each.numpy()) for each in variables]
    bridge.broadcast(values, process_group)
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


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
        self._rooms = Rooms([unit.numel for unit in handle.units])

    def __call__(self, gradients: Sequence[Any]) -> list[Any]:
        """Averages in the dtypes of the gradients; None for None."""
        arrays = self._handle.arrays
        dense: list[Any] = [None if each is None else tf.convert_to_tensor(each) for each in gradients]
        for each, array in zip(dense, arrays, strict=True):
            if each is not None and not each.shape.is_compatible_with(array.shape):
                raise ConfigurationError(
                    f"the gradient of {array.name!r} has shape {each.shape}, the variable has {array.shape}; give one "
                    "of each variable, in their order"
                )
        there = [place for place, each in enumerate(dense) if each is not None]
        if not there:
            raise ConfigurationError("all gradients are None: the loss depends on none of the variables")

        def call(*given: Any) -> list[Any]:
            return self._on_host(dict(zip([arrays[place].name for place in there], given, strict=True)))

        cast = [tf.cast(dense[place], tf.float32) for place in there]
        averages: list[Any] = [None] * len(dense)
        for place, result in zip(there, tf.numpy_function(call, cast, [tf.float32] * len(there)), strict=True):
            averages[place] = tf.cast(tf.ensure_shape(result, arrays[place].shape), dense[place].dtype)
        return averages

    def _on_host(self, given: dict[str, Any]) -> list[Any]:
        """Arrays by name; their averages, in the same order."""
        handle, (buffers, lent) = self._handle, self._rooms.take()
        flats = [buffer.numpy() for buffer in buffers]
        views = {
            slot.name: (index, flat[slot.offset : slot.stop])
            for index, (unit, flat) in enumerate(zip(handle.units, flats, strict=True))
            for slot in unit.slots
        }

        def fill(index: int) -> None:
            for slot in handle.units[index].slots:
                view = views[slot.name][1]
                view[...] = given[slot.name].reshape(-1) if slot.name in given else 0

        handle.average_buckets(buffers, fill)
        averages = [views[name][1].reshape(array.shape) for name, array in given.items()]
        lent += [weakref.ref(each) for each in averages]
        return averages


def _identity(variable: Any) -> int:
    """Of the ``tf.Variable`` that Keras' variables have inside, too."""
    return id(getattr(variable, "value", variable) if hasattr(variable, "path") else variable)
