"""What the front-ends of other frameworks share: their arrays are averaged where they lie, by name and shape."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from gradwire.attach.buckets import Buckets, Work
from gradwire.attach.elsewhere import CPU, Array, Described, bytes_of, stand_in
from gradwire.attach.given import default_group
from gradwire.attach.handle import Handle
from gradwire.attach.roll_call import RollCall
from gradwire.engine import Choices, Methods, Unit
from gradwire.engine.agreement import check_equal
from gradwire.engine.guarding import Guarding
from gradwire.engine.mixture import configure
from gradwire.errors import ConfigurationError, GradwireError
from gradwire.integrations import parts
from gradwire.integrations.ranks import Agreed
from gradwire.wire import ProcessGroupTransport

LINE = 64
"""Bytes of a cache line, at a multiple of which TensorFlow and XLA ask memory to begin that they use as it is."""


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
    """Averages arrays of other frameworks.

    Args:
        arrays: Says what is averaged, in the model's order. What it raises is raised on all ranks.
        method: As in :func:`gradwire.compress`.
        process_group: As in :class:`gradwire.Synchronizer`, and so are the options.
        options: The other choices and the method's hyper-parameters.
        alignment: Elements at a multiple of which each array starts in its bucket.
        device: Where the gradients live.

    Attributes:
        failed: What ended this handle, as it was raised; the framework may show no more than its text. None if nothing
            did.

    Raises:
        ConfigurationError: If anything cannot be as asked, or differs between ranks.
    """

    _replicas = False  # the framework has the values

    def __init__(
        self,
        arrays: Callable[[], Sequence[Described]],
        method: Methods,
        process_group: Any,
        options: Mapping[str, Any],
        *,
        alignment: int = 1,
        device: torch.device = CPU,
    ) -> None:
        fields = {each.name for each in dataclasses.fields(Choices)}
        choices = Choices.of(options)
        hyper = {name: value for name, value in options.items() if name not in fields}
        workers = default_group(process_group)
        self.failed: BaseException | None = None
        self._one_at_a_time = threading.Lock()
        with RollCall(workers) as roll_call:
            if choices.grad_scaler is not None:
                raise ConfigurationError("grad_scaler is torch's own; leave it out, and give gradients without a scale")
            configuration, guarding = configure(method, hyper, choices), Guarding(choices)
            self.arrays = list(arrays())
            named = [(each.name, stand_in(each, device)) for each in self.arrays]
            super().__init__(configuration, named, workers, roll_call, guarding)
        self._buckets = Buckets(self, alignment)

    def check_equal(self, values: Iterable[tuple[str, Array]]) -> None:
        """Raises ConfigurationError on all ranks, and closes the handle, unless all have the same bits."""
        given, device = [(name, bytes_of(value)) for name, value in values], self.engine.store.device
        try:
            self.wire.call(lambda: check_equal(given, self._transport, device, "broadcast rank 0's values before"))
        except ConfigurationError:
            self.close()
            raise

    def average_buckets(
        self,
        buffers: Sequence[Tensor],
        fill: Work | None = None,
        hand_on: Work | None = None,
        after: int | None = None,
    ) -> None:
        """Averages one step's buckets in place, as ``Buckets.average`` does, one step at a time.

        Whatever is raised ends the handle, as the other ranks may be waiting for this one's part.

        Args:
            buffers: See there.
            fill: See there.
            hand_on: See there.
            after: How many averages there have been, by the framework's count; None if it has none.
        """
        work = {name: each for name, each in (("fill", fill), ("hand_on", hand_on)) if each is not None}
        with self._one_at_a_time:
            try:
                if after is not None and after != (made := self.steps()):
                    raise GradwireError(
                        f"the optimizer's state is at average {after}, what gradwire remembers at {made}; save and "
                        "restore both together, and accumulate gradients before they are averaged, not in "
                        "optax.MultiSteps around it"
                    )
                self._buckets.average(buffers, **work)
            except BaseException as error:
                self.failed = self.failed or error
                if self._attached:
                    self.wire.fail(error, raised=True)
                raise

    @property
    def units(self) -> Sequence[Unit]:
        """Where the arrays lie in each bucket."""
        return self._buckets.units

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
        self._rooms.append(([_aligned(numel) for numel in self._numels], []))
        return self._rooms[-1]


def names(variables: Sequence[Any]) -> list[str]:
    """Names of TensorFlow's or Keras' variables that are the same in every process and after a restart: by place.

    What stands before the last part of their names, and what is counted behind it, depends on what else was made.
    """
    short = [each.name.rpartition("/")[2].partition(":")[0] for each in variables]
    return [f"{place}.{name}" for place, name in enumerate(short)]


def broadcast(values: Iterable[Array], process_group: Any = None) -> None:
    """Overwrites arrays by those of rank 0; every rank must call it with arrays of the same shapes and dtypes."""
    group = default_group(process_group)
    transport, device = ProcessGroupTransport(group), distributed_c10d._get_object_coll_device(group)
    for value in values:
        own = bytes_of(value)
        own.copy_(transport.broadcast(own.to(device, copy=True), 0)())


def _aligned(numel: int) -> Tensor:
    """Zeros from the beginning of a cache line on."""
    room = torch.zeros(numel + LINE // 4)
    skipped = -room.data_ptr() % LINE // 4
    return room[skipped : skipped + numel]
