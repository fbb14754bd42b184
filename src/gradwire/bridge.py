"""What the front-ends of other frameworks share: their arrays are averaged where they lie, by name and shape."""

from __future__ import annotations

import threading
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from gradwire.attach.buckets import Buckets, Flat
from gradwire.attach.elsewhere import CPU, Array, Cell, bytes_of, stand_in
from gradwire.attach.given import default_group
from gradwire.attach.handle import Handle
from gradwire.attach.roll_call import RollCall
from gradwire.engine import Choices, Methods
from gradwire.engine.agreement import check_equal
from gradwire.engine.guarding import Guarding
from gradwire.engine.mixture import configure
from gradwire.errors import ConfigurationError, GradwireError
from gradwire.integrations import parts
from gradwire.integrations.ranks import Agreed
from gradwire.wire import ProcessGroupTransport

LINE = 64
"""Bytes at a multiple of which torch's memory begins, and TensorFlow asks memory to begin that it uses as it is."""


class Saved(Handle):
    """A handle whose state is saved and loaded by itself, beside the framework's own checkpoint."""

    def save(self, folder: str | Path) -> None:
        """Writes what this rank remembers to a file of its own in ``folder``; to be called on all ranks."""
        parts.write(Path(folder), [self.state_dict()])

    def load(self, folder: str | Path) -> None:
        """Goes on from what :meth:`save` wrote on all ranks, also of another number of workers; on all ranks.

        Raises:
            ConfigurationError: On all ranks, if a state is missing or does not fit, or ranks have those of different
                steps.
        """
        with Agreed() as agreed:
            if (states := parts.read(Path(folder))) is None:
                raise ConfigurationError(f"{folder} has no states of gradwire; give the folder that save was given")
            self.load_state_dict(states[0])
            agreed.step = self.engine.step


class Bridge(Saved):
    """Averages arrays of other frameworks; arguments, options and what is raised are :class:`gradwire.Synchronizer`'s.

    Args:
        cells: Says what is averaged, in the model's order. What it raises is raised on all ranks.
        method: See there.
        process_group: See there.
        options: The other choices and the method's hyper-parameters.
        alignment: Elements at a multiple of which each array starts in its bucket; what lies between must be zero.
        device: Where the gradients live.

    Attributes:
        cells: What is averaged, by name.
        numels: Elements of each bucket.
        failed: What ended this handle, as it was raised; the framework may show no more than its text. None if nothing
            did.
    """

    _replicas = False  # the framework has the values

    def __init__(
        self,
        cells: Callable[[], Sequence[Cell]],
        method: Methods,
        process_group: Any,
        options: Mapping[str, Any],
        *,
        alignment: int = 1,
        device: torch.device = CPU,
    ) -> None:
        choices = Choices.of(options)
        hyper = {name: value for name, value in options.items() if name not in vars(choices)}
        workers = default_group(process_group)
        self.failed: BaseException | None = None
        self._one_at_a_time = threading.Lock()
        with RollCall(workers) as roll_call:
            if choices.grad_scaler is not None:
                raise ConfigurationError("grad_scaler is torch's own; leave it out, and give gradients without a scale")
            configuration, guarding = configure(method, hyper, choices), Guarding(choices)
            given = list(cells())
            named = [(cell.name, stand_in(cell, device)) for cell in given]
            super().__init__(configuration, named, workers, roll_call, guarding)
        self.cells = {cell.name: cell for cell in given}
        self._buckets = Buckets(self, alignment)
        self.numels = [unit.numel for unit in self._buckets.units]

    def check_equal(self, cells: Iterable[Cell]) -> None:
        """Raises ConfigurationError on all ranks, and closes the handle, unless all have the same bits."""
        given, device = [(cell.name, bytes_of(np.array(cell.read()))) for cell in cells], self.engine.store.device
        try:
            self.wire.call(lambda: check_equal(given, self._transport, device, "broadcast rank 0's values before"))
        except ConfigurationError:
            self.close()
            raise

    def named(self, gradients: Sequence[Any]) -> dict[str, Any]:
        """Gradients by name, of one of each array, in their order; None is left out.

        Raises:
            ConfigurationError: If there are not as many.
        """
        if len(gradients) != len(self.cells):
            raise ConfigurationError(
                f"there are {len(gradients)} gradients for {len(self.cells)} parameters; give one of each, in their "
                "order"
            )
        return {name: each for name, each in zip(self.cells, gradients, strict=True) if each is not None}

    def check_gradient(self, name: str, shape: Sequence[int | None], dtype: str) -> None:
        """Raises ConfigurationError unless a gradient is shaped as its array, and of real numbers of up to 32 bits."""
        if tuple(shape) != (wanted := self.cells[name].shape):
            raise ConfigurationError(
                f"the gradient of {name!r} has shape {tuple(shape)}, the parameter has {wanted}; give one of each "
                "parameter, in their order"
            )
        if dtype not in ("float32", "float16", "bfloat16"):
            raise ConfigurationError(f"the gradient of {name!r} is {dtype}; give float32, float16 or bfloat16")

    def views(self, buffers: Sequence[Flat]) -> list[dict[str, Flat]]:
        """All arrays where they lie in each bucket, as matrices."""
        return [self._buckets.views(index, each) for index, each in enumerate(buffers)]

    def average_arrays(
        self, buffers: Sequence[Tensor], given: Mapping[str, Tensor], after: int | None = None
    ) -> Mapping[str, Tensor]:
        """Averages one step's arrays in buckets, one step at a time; what is missing counts as zero.

        Whatever is raised ends the handle, as the other ranks may be waiting for this one's part.

        Args:
            buffers: ``float32[numel]`` for each bucket, to be overwritten.
            given: Arrays by name.
            after: How many averages there have been, by the framework's count; None if it has none.

        Returns:
            Averages of all arrays, where they lie in the buffers.
        """
        views = self.views(buffers)

        def fill(index: int) -> None:
            for name, view in views[index].items():
                view.copy_(given[name].reshape(view.shape)) if name in given else view.zero_()

        with self._one_at_a_time:
            try:
                if after is not None and after != (made := self.steps()):
                    raise GradwireError(
                        f"the optimizer's state is at average {after}, what gradwire remembers at {made}; save and "
                        "restore both together, and accumulate gradients before they are averaged, not in "
                        "optax.MultiSteps around it"
                    )
                self._buckets.average(buffers, fill)
            except BaseException as error:
                self.failed = self.failed or error
                if self._attached:
                    self.wire.fail(error, raised=True)
                raise
        return ChainMap(*views)

    def steps(self) -> int:
        """Averages made so far, those that were taken back left out; waits for the end of the last."""
        return self.wire.call(lambda: self.engine.step)


class Rooms:
    """Memory for a step's buckets that a framework may keep, used again when it has let go of all of it.

    Args:
        numels: ``float32`` elements of each bucket.
    """

    def __init__(self, numels: Sequence[int]) -> None:
        self._numels = numels
        self._rooms: list[tuple[list[Tensor], list[weakref.ref[Array]]]] = []

    def take(self) -> tuple[list[Tensor], list[weakref.ref[Array]]]:
        """Buckets that nobody uses, and a list for what is lent out of them."""
        for buffers, lent in self._rooms:
            if all(each() is None for each in lent):
                lent.clear()
                return buffers, lent
        self._rooms.append(([torch.zeros(numel) for numel in self._numels], []))
        return self._rooms[-1]


def cells(variables: Sequence[Any], read: Callable[[Any], Array]) -> list[Cell]:
    """TensorFlow's or Keras' variables, by names that are the same in every process and after a restart: by place.

    What stands before the last part of their own names, and what is counted behind it, depends on what else was made.
    """

    def cell(place: int, variable: Any) -> Cell:
        name = f"{place}.{variable.name.rpartition('/')[2].partition(':')[0]}"
        dtype = getattr(variable.dtype, "name", variable.dtype)
        return Cell(name, tuple(variable.shape), dtype, lambda: read(variable), variable.assign)

    return [cell(*each) for each in enumerate(variables)]


def broadcast(given: Iterable[Cell], process_group: Any = None) -> None:
    """Overwrites arrays by those of rank 0; every rank must call it with arrays of the same shapes and dtypes."""
    group = default_group(process_group)
    transport, device = ProcessGroupTransport(group), distributed_c10d._get_object_coll_device(group)
    for cell in given:
        value = np.array(cell.read())
        own = bytes_of(value)
        own.copy_(transport.broadcast(own.to(device, copy=True), 0)())
        cell.write(value)
