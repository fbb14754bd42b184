"""What all workers do alike within ``fit``."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import torch

from gradwire.attach.elsewhere import CPU
from gradwire.attach.foreign import Foreign
from gradwire.attach.given import default_group
from gradwire.engine.agreement import check_same
from gradwire.errors import ConfigurationError
from gradwire.wire import ProcessGroupTransport

_ENDS = "have what ends training do so on all ranks, such as by metrics that gradwire.keras.AverageMetrics() made"


class AverageMetrics(keras.callbacks.Callback):  # type: ignore[misc]
    """Averages an epoch's metrics over all workers, so that callbacks which look at them decide alike.

    To be the first callback, on every rank.

    Args:
        process_group: As in :class:`gradwire.Synchronizer`.
    """

    def __init__(self, process_group: Any = None) -> None:
        super().__init__()
        self._transport = ProcessGroupTransport(default_group(process_group))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Puts averages into the logs.

        Raises:
            ConfigurationError: On all ranks, if they have other metrics.
        """
        own = {name: np.array(value, "float64", order="C") for name, value in sorted((logs or {}).items())}
        remedy = "give every rank the same metrics, and validate on all ranks or on none"
        check_same([f"{name}{[*each.shape] or ''}" for name, each in own.items()], self._transport, CPU, remedy)
        for name, each in own.items():
            self._transport.all_reduce(torch.from_numpy(each.reshape(-1)), torch.distributed.ReduceOp.SUM)()
            (logs or {})[name] = (each if each.shape else float(each)) / self._transport.world_size  # or one a class


class Together(keras.callbacks.Callback):  # type: ignore[misc]
    """Has all ranks train as many steps, and raises on all of them if one would have the others wait.

    Args:
        handle: Of the model.
    """

    async_safe = True  # Keras may call on_train_batch_end from another thread, while training goes on

    def __init__(self, handle: Foreign) -> None:
        super().__init__()
        self._handle, self._alone, self.steps = handle, handle.engine.world_size == 1, 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Raises ConfigurationError if ranks are about to train other numbers of epochs or steps."""
        epochs, steps = self.params.get("epochs"), self.params.get("steps")
        told = [f"epochs={epochs}", f"steps={steps}"]
        self._handle.check_same(told, "give every rank as many batches, such as by dropping the last samples")
        if steps is None and not self._alone:
            raise ConfigurationError("nobody knows how many batches a rank has; give fit steps_per_epoch")

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Raises ConfigurationError if some ranks train no more."""
        self.steps = 0
        self._handle.check_same([f"epoch {epoch} next"], _ENDS)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts."""
        self.steps = max(self.steps, batch + 1)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Raises ConfigurationError, and on the others WireError, if this rank had fewer batches than it told.

        Where a callback ended training within the epoch it waits for the others to end theirs as well.
        """
        done, wanted = self.steps, self.params["steps"]
        if self._alone or done >= wanted:
            return
        if self.model.stop_training:
            with self._handle.roll_call(f"end training after {done} batches") as roll_call:
                return roll_call.ready()
        error = ConfigurationError(
            f"this rank's batches ended after {done} of {wanted}; give every rank as many in every epoch"
        )
        self._handle.wire.fail(error, raised=True)
        raise error

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Raises ConfigurationError if some ranks go on."""
        self._handle.check_same(["the end next"], _ENDS)
