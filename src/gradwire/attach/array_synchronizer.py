"""The way in for arrays of other frameworks: they are averaged where they lie, by name and shape."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from gradwire.attach.buckets import Bucketed, Flat
from gradwire.attach.elsewhere import CPU, Array, Cell, dtype_of, stand_in
from gradwire.attach.foreign import Foreign
from gradwire.attach.given import Named
from gradwire.attach.roll_call import RollCall
from gradwire.engine import Choices, Methods
from gradwire.engine.guards import Unused
from gradwire.errors import ConfigurationError, GradwireError
from gradwire.layout import GRADIENT_DTYPES

ALIGNMENT = 64 // 4
"""``float32`` elements at a multiple of which memory begins that TensorFlow uses as it is; torch's own does."""


class ArraySynchronizer(Foreign, Bucketed):
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
        barrier: Of a framework that begins averages after the program has gone on: waits for all of them.
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
        self.barrier: Callable[[], object] | None = None

        def named() -> Named:
            if choices.grad_scaler is not None:
                raise ConfigurationError("grad_scaler is torch's own; leave it out, and give gradients without a scale")
            given = list(cells())
            self.cells = {cell.name: cell for cell in given}
            return [(cell.name, stand_in(cell, device)) for cell in given]

        hyper = {name: value for name, value in options.items() if name not in vars(choices)}
        super().__init__(named, method, process_group, choices, hyper, alignment)
        self._unused = Unused(self.engine.give_back, ask=False)
        self.engine.guards.append(self._unused)
        self.numels = [unit.numel for unit in self._buckets.units]
        self.failed: BaseException | None = None
        self._one_at_a_time = threading.Lock()
        _open.add(self)

    def named(self, gradients: Sequence[Any]) -> dict[str, Any]:
        """Gradients by name, of one of each array, in their order.

        Raises:
            ConfigurationError: If there are not as many.
        """
        if len(gradients) != len(self.cells):
            raise ConfigurationError(
                f"there are {len(gradients)} gradients for {len(self.cells)} parameters; give one of each, in their "
                "order"
            )
        return dict(zip(self.cells, gradients, strict=True))

    def kinds(self, gradients: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of each average: its array's own shape, and the dtype of its gradient unless that is None.

        Raises:
            ConfigurationError: Unless gradients are shaped as their arrays, and of real numbers of 16 to 64 bits.
        """
        kinds = {name: (self.cells[name].shape, self.cells[name].dtype) for name in gradients}
        for name, each in gradients.items():
            if each is None:
                continue
            (wanted, _), shape, dtype = kinds[name], tuple(each.shape), dtype_of(each)
            if shape != wanted:
                raise ConfigurationError(
                    f"the gradient of {name!r} has shape {shape}, the parameter has {wanted}; give one of each "
                    "parameter, in their order"
                )
            if getattr(torch, dtype, None) not in GRADIENT_DTYPES:
                raise ConfigurationError(
                    f"the gradient of {name!r} is {dtype}; give float32, float16, bfloat16 or float64"
                )
            kinds[name] = wanted, dtype
        return kinds

    def views(self, buffers: Sequence[Flat]) -> ChainMap[str, Flat]:
        """All arrays where they lie in buckets, as matrices."""
        return ChainMap(*self._buckets.views(buffers))

    def average_arrays(
        self, buffers: Sequence[Tensor], given: Mapping[str, Tensor], taken: Iterable[str], after: int | None = None
    ) -> Mapping[str, Tensor]:
        """Averages one step's arrays in buckets, one step at a time; what is missing counts as zero.

        Whatever is raised ends the handle, as the other ranks may be waiting for this one's part.

        Args:
            buffers: ``float32[numel]`` for each bucket, to be overwritten.
            given: Arrays by name.
            taken: The names of averages that are used, on all ranks the same; what memories sent of others goes back.
            after: How many averages there have been, by the framework's count; None if it has none.

        Returns:
            Averages of all arrays, where they lie in the buffers.
        """
        views = self._buckets.views(buffers)
        with self._one_at_a_time:
            try:
                if after is not None and after != (made := self.made()):
                    raise GradwireError(
                        f"the optimizer's state is at average {after}, what gradwire remembers at {made}; save and "
                        "restore both together, and accumulate gradients before they are averaged, not in "
                        "optax.MultiSteps around it"
                    )
                self._unused.names.update(self.cells.keys() - set(taken))
                self._buckets.average(buffers, views, given)
            except BaseException as error:
                self.failed = self.failed or error
                if self.attached:
                    self.wire.fail(error, raised=True)
                raise
        return ChainMap(*views)

    def average_tensors(self, buffers: Sequence[Tensor], given: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """As :meth:`average_arrays`, for torch's own: averages are copies, in the dtypes of :meth:`kinds`."""
        present, kinds = {name: each.detach() for name, each in given.items() if each is not None}, self.kinds(given)
        views = self.average_arrays(buffers, present, kinds)
        return {name: views[name].reshape(shape).to(getattr(torch, dtype)) for name, (shape, dtype) in kinds.items()}

    def made(self) -> int:
        """Averages made so far, from within the framework's own: those that it has not begun are left out."""
        return self.wire.call(lambda: self.engine.step)

    def steps(self) -> int:
        """Averages made so far, those that were taken back left out; waits for the end of the last."""
        self.settle()
        return self.made()

    def settle(self) -> None:
        """Waits until all averages that the program asked for are made, or failed, which the framework tells.

        Not to be called from within a callback of the framework's, which would wait for itself.
        """
        if self.barrier is not None:
            with suppress(Exception):
                self.barrier()

    def state_dict(self) -> dict[str, Any]:
        """As :meth:`gradwire.Handle.state_dict`, after all averages that the program asked for."""
        self.settle()
        return super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As :meth:`gradwire.Handle.load_state_dict`, after all averages that the program asked for."""
        self.settle()
        super().load_state_dict(state)

    def check_same(self, lines: Sequence[str], remedy: str) -> None:
        """As in :class:`Foreign`, after all averages that the program asked for."""
        self.settle()
        super().check_same(lines, remedy)

    @contextmanager
    def _between_steps(self, do: str) -> Iterator[RollCall]:
        self.settle()
        with super()._between_steps(do) as roll_call:
            yield roll_call

    def close(self) -> None:
        """As :meth:`gradwire.Handle.close`, after all averages that the program asked for."""
        if self.attached:
            self.settle()
        super().close()

    def __del__(self) -> None:
        self.barrier = None  # nobody asked for averages that were not made; and one may be under way on this thread
        super().__del__()


_open: weakref.WeakSet[ArraySynchronizer] = weakref.WeakSet()


@atexit.register
def _settle_all() -> None:
    """Has the last averages made before the wires are closed: other ranks may wait for them."""
    for handle in list(_open):
        if handle.attached:
            handle.settle()


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

    def average(self, handle: ArraySynchronizer, given: Mapping[str, Array], taken: Sequence[str]) -> list[Array]:
        """Averages of the arrays that are taken, in that order, where they lie in a room."""
        buffers, lent = self.take()
        views = handle.average_arrays(buffers, {name: torch.from_numpy(each) for name, each in given.items()}, taken)
        averages = [views[name].numpy().reshape(handle.cells[name].shape) for name in taken]
        lent += [weakref.ref(each) for each in averages]
        return averages
