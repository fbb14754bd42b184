"""Which guards an attachment has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gradwire.train.guards.audit import Auditor, check_audit_every
from gradwire.train.guards.guard import Guard
from gradwire.train.guards.loss_scale import LossScale, check_scaler
from gradwire.train.guards.rollback import Rollback, check_rollback

if TYPE_CHECKING:
    from gradwire.train.engine import Engine


@dataclass(frozen=True)
class Guarding:
    """What is done around every average, as :func:`gradwire.compress` takes it.

    Attributes:
        grad_scaler: What scales the loss, if anything.
        rollback: Whether a step that is not finite is taken back; None for wherever there is a ``grad_scaler``.
        audit_every: Steps from one audit to the next; 0 for none.
    """

    grad_scaler: torch.amp.GradScaler | None = None
    rollback: bool | None = None
    audit_every: int = 0

    def __post_init__(self) -> None:
        check_scaler(self.grad_scaler)
        check_rollback(self.rollback)
        check_audit_every(self.audit_every)

    @property
    def rolls_back(self) -> bool:
        """Whether a step that is not finite is taken back."""
        return self.grad_scaler is not None if self.rollback is None else self.rollback

    def guards(self, engine: Engine, parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> list[Guard]:
        """The guards, the outermost first: what is handed on is looked at last, what the method sees is audited."""
        guards: list[Guard] = []
        if self.rolls_back:
            guards.append(Rollback(engine, {name: parameter.dtype for name, parameter in parameters}))
        if self.grad_scaler is not None:
            guards.append(LossScale(self.grad_scaler, engine.store))
        if self.audit_every:
            guards.append(Auditor(self.audit_every, [name for name, _ in parameters], engine, engine.rank))
        return guards

    def describe(self) -> dict[str, str]:
        """Everything that must be the same on all ranks, as text."""
        scale = "none" if self.grad_scaler is None else f"with scale {self.grad_scaler.get_scale()}"
        return {
            "grad_scaler": scale,
            "rollback": str(self.rolls_back),
            "audit_every": str(self.audit_every),
        }
