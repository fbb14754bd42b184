"""Now and then a gradient is averaged densely, too, to see what compression makes of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from gradwire.engine.guards.guard import Guard, Progress
from gradwire.engine.unit import Unit
from gradwire.errors import ConfigurationError
from gradwire.wire.requests import AllReduceMean, Synchronization

KEPT = 1000
"""Audits that are remembered, the newest ones."""

_log = logging.getLogger("gradwire")


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far a compressed average is from the dense one; all norms are Euclidean, in the gradient's units.

    Attributes:
        product: Inner product of the two averages.
        dense_norm: Norm of the dense average.
        compressed_norm: Norm of the compressed average.
        error_norm: Norm of their difference.
        residual_norm: Norm of what this rank keeps of what it did not send, after the step; 0 where it keeps nothing.
    """

    product: float
    dense_norm: float
    compressed_norm: float
    error_norm: float
    residual_norm: float

    @property
    def cosine(self) -> float:
        """Cosine of the angle between the two averages; NaN where one of them is zero."""
        norms = self.dense_norm * self.compressed_norm
        return self.product / norms if norms else math.nan

    @property
    def relative_error(self) -> float:
        """Norm of the difference over that of the dense average; NaN where that is zero."""
        return self.error_norm / self.dense_norm if self.dense_norm else math.nan

    @classmethod
    def together(cls, parts: Sequence[Deviation]) -> Deviation:
        """Of several tensors as one vector."""
        return cls(
            product=math.fsum(part.product for part in parts),
            dense_norm=math.hypot(*(part.dense_norm for part in parts)),
            compressed_norm=math.hypot(*(part.compressed_norm for part in parts)),
            error_norm=math.hypot(*(part.error_norm for part in parts)),
            residual_norm=math.hypot(*(part.residual_norm for part in parts)),
        )


@dataclass(frozen=True)
class Audit:
    """One step's averages, held against the dense ones; the same on every rank, but for the residual.

    Attributes:
        step: Counts synchronised steps, from 0, as a state does: one that is taken back is taken anew, and a loaded
            state goes on.
        layers: By parameter name, in the model's order; those averaged densely are there, too.
        whole: The whole gradient.
    """

    step: int
    layers: Mapping[str, Deviation]
    whole: Deviation

    def __str__(self) -> str:
        whole = self.whole
        return (
            f"step {self.step}: cosine {whole.cosine:.4f} to the dense average, relative error "
            f"{whole.relative_error:.4f}, residual norm {whole.residual_norm:.4g}"
        )


class ScalarWriter(Protocol):
    """What is asked of a ``torch.utils.tensorboard.SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Writes one number."""
        ...


class Auditor(Guard):
    """Averages a copy of every gradient of an audited step beside it; what is compressed never knows.

    To be the innermost guard, so that it sees what the method sees. The copy goes in the same round as the gradient's
    payload, as a collective of its own.

    Args:
        every: Steps from one audit to the next; the first step is audited.
        names: The model's parameters, in its order.
        progress: The engine whose guard this is.
        rank: This worker; the first one logs.
        unsent: The store's fields of what is kept of a parameter because it was not sent.
    """

    def __init__(
        self,
        every: int,
        names: Sequence[str],
        progress: Progress,
        rank: int,
        unsent: Callable[[str], Sequence[str]],
    ) -> None:
        self._every = every
        self._names = names
        self._progress = progress
        self._rank = rank
        self._unsent = unsent
        self._step: int | None = None
        self._told = -1
        self._dense: dict[Unit, Tensor] = {}
        self._found: dict[int, dict[str, Deviation]] = {}

    def before_encode(self, unit: Unit, gradient: Tensor) -> None:
        """Copies the gradient, if its step is to be audited."""
        if self._step is None:
            self._step = self._progress.step
            self._forget(self._step)
        if self._step % self._every == 0:
            self._dense[unit] = gradient.clone()

    def _forget(self, step: int) -> None:
        """Forgets steps from this one on, which are taken anew: after a rollback, or from an earlier state."""
        while self._found and next(reversed(self._found)) >= step:
            self._found.popitem()
        self._told = min(self._told, step - 1)

    def beside(self, unit: Unit, gradient: Tensor) -> list[Synchronization]:
        """Asks for the copy's average."""
        return [self._average(unit)] if unit in self._dense else []

    def _average(self, unit: Unit) -> Synchronization:
        self._dense[unit] = yield AllReduceMean(self._dense[unit], beside=True)

    def after_decode(self, unit: Unit, average: Tensor) -> None:
        """Compares the two averages."""
        if self._step is None or (dense := self._dense.pop(unit, None)) is None:
            return
        found = self._found.setdefault(self._step, {})
        for slot in unit.slots:
            of_slot = slice(slot.offset, slot.stop)
            kept = [self._progress.store.get(field, slot.name) for field in self._unsent(slot.name)]
            residuals = [each for each in kept if each is not None]
            found[slot.name] = _deviation(dense[of_slot], average[of_slot], residuals)

    def after_step(self) -> None:
        """Logs the step's audit, if there was one."""
        step, self._step = self._step, None
        if step in self._found:
            if self._rank == 0:
                _log.info("%s", self._audit(step))
            while len(self._found) > KEPT:
                del self._found[next(iter(self._found))]

    def audits(self) -> list[Audit]:
        """The newest 1,000 audits, the oldest of them first."""
        return [self._audit(step) for step in list(self._found)]

    def news(self) -> Iterator[Audit]:
        """Those that it has not told of yet, the oldest of them first."""
        for step in [each for each in self._found if each > self._told]:
            yield self._audit(step)
            self._told = step

    def newest(self) -> Audit | None:
        """The last audit, if there was any."""
        return self._audit(next(reversed(self._found))) if self._found else None

    def _audit(self, step: int) -> Audit:
        found = self._found[step]
        layers = {name: found[name] for name in self._names if name in found}
        return Audit(step, layers, Deviation.together(list(layers.values())))


def check_audit_every(audit_every: int) -> None:
    """Raises ConfigurationError unless it is a number of steps, or 0."""
    if not isinstance(audit_every, int) or isinstance(audit_every, bool) or audit_every < 0:
        raise ConfigurationError(
            f"audit_every={audit_every!r} is out of range; choose a whole number of steps, or 0 for no audits"
        )


def write(writer: ScalarWriter, audit: Audit, layers: bool) -> None:
    """Writes an audit, and its layers if asked to."""
    parts = {"gradwire": audit.whole}
    if layers:
        parts |= {f"gradwire/{name}": deviation for name, deviation in audit.layers.items()}
    for tag, deviation in parts.items():
        writer.add_scalar(f"{tag}/cosine", deviation.cosine, audit.step)
        writer.add_scalar(f"{tag}/relative_error", deviation.relative_error, audit.step)
        writer.add_scalar(f"{tag}/residual_norm", deviation.residual_norm, audit.step)


def _deviation(dense: Tensor, compressed: Tensor, residuals: Sequence[Tensor]) -> Deviation:
    wide, other = dense.double(), compressed.double()
    return Deviation(
        product=float(wide @ other),
        dense_norm=float(torch.linalg.vector_norm(wide)),
        compressed_norm=float(torch.linalg.vector_norm(other)),
        error_norm=float(torch.linalg.vector_norm(other - wide)),
        residual_norm=math.hypot(*(float(torch.linalg.vector_norm(each, dtype=torch.float64)) for each in residuals)),
    )
