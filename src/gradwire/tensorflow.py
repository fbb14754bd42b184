"""TensorFlow: gradients of a ``GradientTape`` are averaged, compressed, also from within a ``tf.function``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from gradwire.attach import elsewhere
from gradwire.attach.array_synchronizer import ALIGNMENT, ArraySynchronizer, Rooms
from gradwire.attach.elsewhere import Array, Cell
from gradwire.engine import RECIPE, Methods
from gradwire.errors import ConfigurationError

try:
    import tensorflow as tf
except ImportError as error:
    raise ImportError(f"{error}; TensorFlow comes with pip install 'gradwire[tensorflow]'") from error

Function = TypeVar("Function", bound=Callable[..., Any])

# Or TensorFlow would make a graph of each line of Python here.
_as_it_is: Callable[[Function], Function] = tf.autograph.experimental.do_not_convert


class Synchronizer(ArraySynchronizer):
    """Averages gradients of variables over all processes, in a ``tf.function`` or eagerly.

    To be made on every rank with the same arguments, outside of any ``tf.function``. All other arguments, options and
    what is raised are :class:`gradwire.Synchronizer`'s.

    Args:
        variables: ``tf.Variable`` or ``keras.Variable``, the same values on all ranks; :func:`broadcast` makes them so.

    Example::

        sync = gradwire.tensorflow.Synchronizer(model.trainable_variables, "topk", ratio=0.01)
        gradients = sync.average(tape.gradient(loss, model.trainable_variables))
    """

    def __init__(
        self, variables: Sequence[Any], method: Methods = RECIPE, *, process_group: Any = None, **options: Any
    ) -> None:
        self.variables = list(variables)

        def cells() -> list[Cell]:
            check_surroundings()
            return elsewhere.cells(self.variables)

        super().__init__(cells, method, process_group, options, alignment=ALIGNMENT)
        self.check_equal(self.cells.values())
        self.averages = averaging(self)

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
    """
    gradients_of = tape.gradient
    names = {_identity(each): name for each, name in zip(synchronizer.variables, synchronizer.cells, strict=True)}

    @_as_it_is
    def gradient(target: Any, sources: Any, *args: Any, **options: Any) -> Any:
        flat = tf.nest.flatten(sources)
        if unknown := [getattr(each, "name", "a tensor") for each in flat if _identity(each) not in names]:
            raise ConfigurationError(
                f"{unknown[0]!r} is none of the synchronizer's variables; make it of all that are trained"
            )
        ours = [names[_identity(each)] for each in flat]
        averages = synchronizer.averages(dict(zip(ours, gradients_of(target, flat, *args, **options), strict=True)))
        return tf.nest.pack_sequence_as(sources, [averages[name] for name in ours])

    tape.gradient = gradient
    return tape


def broadcast(variables: Sequence[Any], process_group: Any = None) -> None:
    """Gives variables the values of rank 0's; to be called on all ranks, outside of any ``tf.function``."""
    check_surroundings()
    elsewhere.broadcast(elsewhere.cells(variables), process_group)


def check_surroundings(strategy: Any = None) -> None:
    """Raises ConfigurationError in a ``tf.function``, with several devices, or a ``tf.distribute`` strategy."""
    if not tf.executing_eagerly():
        raise ConfigurationError("within a tf.function variables have no values yet; do this once, outside of it")
    now = tf.distribute.get_strategy()
    if tf.distribute.has_strategy() or strategy not in (None, now):
        raise elsewhere.averages_itself(f"{type(strategy or now).__name__} of tf.distribute")
    for kind in ("GPU", "CPU"):
        found = len(tf.config.list_logical_devices(kind))
        elsewhere.check_one_device("TensorFlow", found, "tf.config.set_logical_device_configuration")


def averaging(handle: ArraySynchronizer) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Averages by name, in memory that TensorFlow takes as it is: gradients are copied to it once, averages stay."""
    rooms = Rooms(handle.numels)

    def averages(gradients: Mapping[str, Any]) -> dict[str, Any]:
        present = {name: each for name, each in gradients.items() if each is not None}
        if not present:
            raise ConfigurationError("all gradients are None: the loss depends on none of the variables")
        given = {name: _shaped(tf.convert_to_tensor(each), handle.cells[name]) for name, each in present.items()}
        names, kinds = list(given), handle.kinds({**gradients, **given})

        def on_host(*arrays: Any) -> list[Array]:
            return rooms.average(handle, dict(zip(names, map(np.asarray, arrays), strict=True)), list(kinds))

        wide = [tf.cast(each, tf.float32) for each in given.values()]
        made = tf.nest.flatten(tf.numpy_function(on_host, wide, [tf.float32] * len(kinds)))  # one comes without a list
        found = zip(kinds.items(), made, strict=True)
        return {name: tf.cast(tf.ensure_shape(each, shape), dtype) for (name, (shape, dtype)), each in found}

    return averages


def _shaped(gradient: Any, cell: Cell) -> Any:
    """A gradient of the array's shape, where TensorFlow knows less of it than that."""
    unsure = gradient.shape.is_compatible_with(cell.shape) and not gradient.shape.is_fully_defined()
    return tf.ensure_shape(gradient, cell.shape) if unsure else gradient


def _identity(variable: Any) -> int:
    """Of the ``tf.Variable`` that Keras' variables have inside, too."""
    return id(variable.value if hasattr(variable, "path") else variable)
