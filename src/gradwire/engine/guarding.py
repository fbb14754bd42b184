"""Which guards an attachment has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.engine.configuration import Configuration
from gradwire.engine.engine import Engine
from gradwire.engine.guards.audit import Auditor, check_audit_every
from gradwire.engine.guards.digest import Digest, check_verification
from gradwire.engine.guards.guard import Guard
from gradwire.engine.guards.learning_rate import LearningRate, check_rate
from gradwire.engine.guards.loss_scale import LossScale, check_scaler
from gradwire.engine.guards.rollback import Rollback, check_rollback
from gradwire.memory import Memory

VERIFY_EVERY = 100
"""Steps from one comparison of all ranks' averages to the next, where that is asked for."""


@dataclass(frozen=True)
class Guarding:
    """What is done around every average, as :func:`gradwire.compress` takes it.

    Attributes:
        grad_scaler: What scales the loss, if anything.
        rollback: Whether a step that is not finite is taken back; None for wherever there is a ``grad_scaler``, or a
            memory that parts.
        learning_rate: What gives the rate that memories are weighed by, if anything.
        audit_every: Steps from one audit to the next; 0 for none.
        verify: Whether payloads carry checksums, and the averages of all ranks are compared.
        verify_every: Steps from one such comparison to the next.
        comparison: Makes the guard that compares, given ``verify_every``.
        agree: Asks those who average other parts of the same model whether a step was good; None if there are none.
    """

    grad_scaler: torch.amp.GradScaler | None = None
    rollback: bool | None = None
    learning_rate: Callable[[], float] | None = None
    audit_every: int = 0
    verify: bool = False
    verify_every: int = VERIFY_EVERY
    comparison: Callable[[int], Guard] = Digest
    agree: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        check_scaler(self.grad_scaler)
        check_rollback(self.rollback)
        check_audit_every(self.audit_every)
        check_verification(self.verify, self.verify_every)

    def check(self, configuration: Configuration) -> None:
        """Raises ConfigurationError if a guard cannot go along with what was chosen otherwise."""
        check_rate(self.learning_rate, configuration.memory)

    def rolls_back(self, memory: Memory) -> bool:
        """Whether a step that is not finite is taken back."""
        return self.grad_scaler is not None or memory.parts if self.rollback is None else self.rollback

    def guards(self, engine: Engine, parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> list[Guard]:
        """The guards, the outermost first: what is handed on is looked at last, what the method sees is audited."""
        guards: list[Guard] = [self.comparison(self.verify_every)] if self.verify else []
        if self.rolls_back(engine.configuration.memory):
            dtypes = {name: parameter.dtype for name, parameter in parameters}
            guards.append(Rollback(engine, dtypes) if self.agree is None else Rollback(engine, dtypes, self.agree))
        if self.grad_scaler is not None:
            guards.append(LossScale(self.grad_scaler, engine.store))
        if self.learning_rate is not None:
            guards.append(LearningRate(self.learning_rate, engine.store, engine.configuration.memory))
        if self.audit_every:
            guards.append(Auditor(self.audit_every, [name for name, _ in parameters], engine, engine.rank))
        return guards

    def describe(self, configuration: Configuration) -> dict[str, str]:
        """Everything that must be the same on all ranks, as text."""
        scale = "none" if self.grad_scaler is None else f"with scale {self.grad_scaler.get_scale()}"
        return {
            "grad_scaler": scale,
            "rollback": str(self.rolls_back(configuration.memory)),
            "learning_rate": "none" if self.learning_rate is None else "given",
            "audit_every": str(self.audit_every),
            "verify": f"every {self.verify_every} steps" if self.verify else "no",
        }
