"""Arrays of other frameworks: what is known of them, and what stands for them here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.nn import Parameter

from gradwire.attach.given import default_group
from gradwire.engine.agreement import check_same
from gradwire.errors import ConfigurationError
from gradwire.layout import as_matrix
from gradwire.wire import ProcessGroupTransport

Array = np.ndarray[Any, np.dtype[Any]]

CPU = torch.device("cpu")


class Cell(NamedTuple):
    """An array of a framework's: its dtype as numpy names it, its values now, what replaces them, if it is trained."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Array]
    write: Callable[[Array], object]
    trained: bool = True


def dtype_of(array: Any) -> str:
    """The name that numpy has for the dtype of a framework's array."""
    return str(getattr(array.dtype, "name", array.dtype)).removeprefix("torch.")


def cells(variables: Sequence[Any]) -> list[Cell]:
    """TensorFlow's or Keras' variables, by names that are the same in every process and after a restart: by place.

    What stands before the last part of their own names, and what is counted behind it, depends on what else was made.

    Raises:
        ConfigurationError: If anything else is among them.
    """
    if wrong := [each for each in variables if not hasattr(each, "assign")]:
        raise ConfigurationError(
            f"{type(wrong[0]).__name__} is no variable; give a list of tf.Variable or keras.Variable, such as "
            "model.trainable_variables"
        )

    def cell(place: int, variable: Any) -> Cell:
        name = f"{place}.{variable.name.rpartition('/')[2].partition(':')[0]}"
        kind = name, tuple(variable.shape), dtype_of(variable)
        return Cell(*kind, lambda: np.asarray(variable), variable.assign, variable.trainable)

    return [cell(*each) for each in enumerate(variables)]


def stand_in(cell: Cell, device: torch.device = CPU) -> Parameter:
    """A parameter of an array's kind, as a matrix and without its room.

    Raises:
        ConfigurationError: If the array is not of real numbers that torch has, too.
    """
    dtype = getattr(torch, cell.dtype, None)
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigurationError(f"{cell.name!r} has dtype {cell.dtype}; gradwire averages gradients of real numbers")
    return Parameter(torch.zeros((), dtype=dtype, device=device).expand(as_matrix(cell.shape)))


def check_alike(given: Iterable[Cell], process_group: Any = None, *more: str) -> None:
    """Raises ConfigurationError on all ranks, unless they have arrays of the same kinds, and ``more`` is the same."""
    transport, device = _collectives(process_group)
    check_same([*more, *kinds(given)], transport, device, "give every rank the same model and optimizer")


def kinds(given: Iterable[Cell]) -> list[str]:
    """What arrays are, in words; without names, which depend on what else a rank has made."""
    return [
        f"array {place} of shape {cell.shape} and dtype {cell.dtype}, {'' if cell.trained else 'not '}to be trained"
        for place, cell in enumerate(given)
    ]


def _collectives(process_group: Any) -> tuple[ProcessGroupTransport, torch.device]:
    """The group's own, and what they send from."""
    group = default_group(process_group)
    return ProcessGroupTransport(group), torch.device(distributed_c10d._get_object_coll_device(group))


def bytes_of(array: Array) -> Tensor:
    """An array's memory, whatever its dtype."""
    return torch.from_numpy(array.reshape(-1).view(np.uint8))


def broadcast(given: Iterable[Cell], process_group: Any = None) -> None:
    """Overwrites arrays by those of rank 0; to be called on all ranks.

    Raises:
        ConfigurationError: On all ranks, unless they have arrays of the same kinds.
    """
    cells, (transport, device) = list(given), _collectives(process_group)
    check_alike(cells, process_group)
    for cell in cells:
        value = np.array(cell.read())
        own = bytes_of(value)
        own.copy_(transport.broadcast(own.to(device, copy=True), 0)())
        cell.write(value)


def check_one_device(framework: str, devices: int, making: str) -> None:
    """Raises ConfigurationError if a process has several devices, of which ``making`` makes several out of a CPU."""
    if devices > 1:
        raise ConfigurationError(
            f"this process has {devices} devices of {framework}'s; start a process for each, without {making}, or with "
            "CUDA_VISIBLE_DEVICES of one device"
        )


def averages_itself(other: str) -> ConfigurationError:
    """Says that something of the framework's own averages, too."""
    return ConfigurationError(
        f"{other} averages by itself; leave it out, and start a process for each worker, as torchrun does"
    )


def another_optimizer(said: str) -> ConfigurationError:
    """Says that a model's optimizer is not the one that has the method."""
    return ConfigurationError(
        f"{said}, without gradwire's method; close the handle, compile, and compress again; or keep the optimizer that "
        "has it, as compile(optimizer=model.optimizer) does"
    )
