"""What is done around every average, whatever the method."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from gradwire.deferred import Later
from gradwire.engine.unit import Unit
from gradwire.memory import Store
from gradwire.wire.requests import Synchronization


class Progress(Protocol):
    """What guards ask of the engine.

    Attributes:
        step: Counts synchronised steps, from 0.
        store: What memories keep.
        later: What the host is told of a step in the next.
        observed: Whether squares of samples or micro-batches are told to methods that ask for them.
    """

    step: int
    observed: bool
    store: Store
    later: Later


class Guard:
    """Goes along with every gradient: before it is compressed, beside it on the wire, and when its average has landed.

    All calls but :meth:`before_step` and :meth:`on_arrival` come on the wire's thread, in the same order on every rank.
    This one does nothing.
    """

    def before_step(self) -> None:
        """Called by whoever asks for an average, before a step's first gradient is handed to the wire.

        Raises:
            ConfigurationError: If it cannot be had as things are; nothing is changed.
        """

    def on_arrival(self) -> None:
        """Called by whoever asks for an average, whenever a buffer of a step is handed to the wire."""

    def before_encode(self, unit: Unit, gradient: Tensor) -> None:
        """Called with a gradient before it is compressed, ``float32[unit.numel]``; may change it."""

    def beside(self, unit: Unit, gradient: Tensor) -> list[Synchronization]:
        """What else is to be sent, in the same rounds; the gradient's buffer must not be changed by it."""
        return []

    def after_decode(self, unit: Unit, average: Tensor) -> None:
        """Called with the average before it is handed on; may change it."""

    def after_step(self) -> None:
        """Called once every average of a step has been handed on, before the next step's first gradient is taken."""
