"""Metrics of all workers."""

from __future__ import annotations

from typing import Any

import keras
import torch

from gradwire.attach.elsewhere import CPU
from gradwire.attach.given import default_group
from gradwire.engine.agreement import check_same
from gradwire.errors import ConfigurationError
from gradwire.wire import ProcessGroupTransport


class AverageMetrics(keras.callbacks.Callback):  # type: ignore[misc]
    """Averages an epoch's metrics over all workers, so that callbacks which look at them decide alike.

    To be the first callback, on every rank. It also compares what all ranks are about to do: one that trains fewer
    steps than others would have them wait for it.

    Args:
        process_group: As in :class:`gradwire.Synchronizer`.
    """

    def __init__(self, process_group: Any = None) -> None:
        super().__init__()
        self._transport = ProcessGroupTransport(default_group(process_group))

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Raises ConfigurationError on all ranks if they are about to train another number of epochs or steps."""
        if self.params.get("steps") is None and self._transport.world_size > 1:
            raise ConfigurationError("nobody knows how many batches a rank has; give fit steps_per_epoch")
        told = [f"{key}={self.params.get(key)}" for key in ("epochs", "steps")]
        check_same(told, self._transport, CPU, "give every rank as many batches, such as by dropping the last samples")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Puts averages into the logs.

        Raises:
            ConfigurationError: On all ranks, if they have other metrics.
        """
        names = sorted(logs or {})
        check_same(
            names, self._transport, CPU, "give every rank the same metrics, and validate on all ranks or on none"
        )
        values = torch.tensor([float((logs or {})[name]) for name in names], dtype=torch.float64)
        self._transport.all_reduce(values, torch.distributed.ReduceOp.SUM)()
        (logs or {}).update(zip(names, (values / self._transport.world_size).tolist(), strict=True))
