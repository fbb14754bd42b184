"""What the integrations have in common: a method that waits for models, and a state on every rank."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.attach import Handle, compress
from gradwire.attach.wrappers import unwrapped_model
from gradwire.engine import Methods, Stats
from gradwire.errors import ConfigurationError
from gradwire.state import parts
from gradwire.state.form import emptied
from gradwire.state.ranks import Agreed, State, alone, workers

_log = logging.getLogger("gradwire")


class Attachment:
    """A compression method, and the models that a trainer wraps one after another.

    A process that trains alone has no DDP models: nothing is sent and nothing compressed, and a warning says so.

    Args:
        method: As in :func:`gradwire.compress`.
        options: Further arguments of :func:`gradwire.compress`.

    Attributes:
        handles: Of the models that the method is attached to, in the order of wrapping; empty before the first one and
            in a process that trains alone.
    """

    def __init__(self, method: Methods, options: Mapping[str, Any]) -> None:
        self.handles: list[Handle] = []
        self._modules: list[weakref.ref[nn.Module]] = []
        self._method = method
        self._options = dict(options)
        self._logged = self.stats()

    def attach(self, model: nn.Module, grad_scaler: torch.amp.GradScaler | None = None) -> None:
        """Attaches the method to a model as the trainer has wrapped it.

        Args:
            model: See :func:`gradwire.compress`; in a process that trains alone any model, which stays as it is.
            grad_scaler: What scales the loss, unless the options name one.

        Raises:
            ConfigurationError: As :func:`gradwire.compress` does.
        """
        inner = unwrapped_model(model)
        if not isinstance(inner, DistributedDataParallel) and workers() == 1:
            alone()
            return
        options = {"grad_scaler": grad_scaler, **self._options}
        self.handles.append(compress(model, self._method, **options))
        self._modules.append(weakref.ref(getattr(inner, "module", inner)))

    def averages(self, module: nn.Module) -> bool:
        """Whether the method is attached to this module, as wrapped now or by an earlier wrapper."""
        return any(each() is module for each in self._modules)

    def stats(self) -> Stats:
        """What this rank counted: bytes and seconds of all models, steps of the one that took most."""
        each = [handle.stats() for handle in self.handles]
        return Stats(
            max((stats.steps for stats in each), default=0),
            sum(stats.dense_bytes for stats in each),
            sum(stats.wire_bytes for stats in each),
            {stage: sum(stats.seconds[stage] for stats in each) for stage in (each[0].seconds if each else ())},
            node_bytes=sum(stats.node_bytes for stats in each),
        )

    def figures(self) -> dict[str, float]:
        """Numbers for a logger: totals as ``gradwire/...``, since the last call as ``gradwire/recent/...``."""
        if not self.handles:
            return {}
        now, before = self.stats(), self._logged
        self._logged = now
        return now.as_dict("gradwire/") | now.since(before).as_dict("gradwire/recent/")

    def state(self) -> list[State]:
        """This rank's states, one for every model."""
        return [handle.state_dict() for handle in self.handles]

    def restore(self, states: Sequence[State]) -> None:
        """Goes on from this rank's states, one for every model.

        Raises:
            ConfigurationError: If there are more or fewer, or one does not fit.
        """
        if len(states) != len(self.handles):
            raise ConfigurationError(
                f"states were saved of {len(states)} models, the method is attached to {len(self.handles)}; wrap as "
                "many, in the same order, before loading"
            )
        for handle, state in zip(self.handles, states, strict=True):
            handle.load_state_dict(state)

    def forget(self) -> None:
        """Begins as if the method had just been attached: with nothing remembered, at its first step."""
        self.restore([emptied(state) for state in self.state()])

    def save(self, folder: str | Path) -> None:
        """Writes this rank's states beside the trainer's own files; to be called on all ranks."""
        if self.handles:
            parts.write(Path(folder), self.state())

    def load(self, folder: str | Path) -> None:
        """Goes on from what :meth:`save` wrote on all ranks, also of another number of workers; on all ranks.

        States of another number of workers go through :func:`gradwire.redistribute`. Where nothing was saved, memories
        start empty, and a warning says so.

        Args:
            folder: Where all ranks saved; where ranks have disks of their own, each needs what it wrote itself, and to
                go on as another number of workers all of it.

        Raises:
            ConfigurationError: On all ranks, if a state does not fit or is missing, or ranks have those of different
                steps.
        """
        if not self.handles:
            if parts.found(Path(folder)):
                _log.warning("%s has states of gradwire; a process that trains alone leaves them out", folder)
            return
        with Agreed() as agreed:
            states = parts.read(Path(folder))
            if states is not None:
                self.restore(states)
                agreed.step = self.handles[0].engine.step
        if agreed.step is None:
            self.forget()
            if dist.get_rank() == 0:
                _log.warning("%s has no states of gradwire: what compression remembers starts empty", folder)

    def close(self) -> None:
        """Closes all handles, as :meth:`gradwire.Handle.close` does."""
        for handle in self.handles:
            handle.close()
        self.handles = []
        self._modules = []
        self._logged = self.stats()

    def __reduce__(self) -> tuple[type[Attachment], tuple[Methods, dict[str, Any]]]:
        """A copy has the method, and no models yet: what averages stays with the one that was copied."""
        return Attachment, (self._method, self._options)

    def __repr__(self) -> str:
        return f"gradwire.integrations.Attachment({', '.join(map(repr, self.handles)) or 'no model yet'})"
