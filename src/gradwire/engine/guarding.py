"""Which guards an attachment has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gradwire.engine.choices import Choices
from gradwire.engine.configuration import Configuration
from gradwire.engine.engine import Engine
from gradwire.engine.guards.audit import Auditor, check_audit_every
from gradwire.engine.guards.digest import Digest, check_verify_every
from gradwire.engine.guards.guard import Guard
from gradwire.engine.guards.learning_rate import LearningRate, check_rate
from gradwire.engine.guards.loss_scale import LossScale, check_scaler
from gradwire.engine.guards.rollback import Rollback, check_rollback
from gradwire.engine.guards.spikes import Spikes, check_spikes
from gradwire.engine.guards.unobserved import Unobserved
from gradwire.engine.mixture import Configured
from gradwire.errors import ConfigurationError


class Agree(Protocol):
    """Asks those who average other parts of the same model whether a step was good."""

    def __call__(self, good: Tensor) -> Tensor:
        """Whether what is true here is true for all of them."""
        ...

    def close(self) -> None:
        """Leaves them."""
        ...


@dataclass(frozen=True)
class Guarding:
    """What is done around every average.

    Attributes:
        choices: What was asked for.
        comparison: Makes the guard that compares over all ranks, given ``verify_every``.
        agree: Asks those who average other parts of the same model; None if there are none.
    """

    choices: Choices
    comparison: Callable[[int], Guard] = Digest
    agree: Agree | None = None

    def __post_init__(self) -> None:
        _check_name(self.choices.name)
        check_scaler(self.choices.grad_scaler)
        check_rollback(self.choices.rollback)
        check_spikes(self.choices.clip_spikes)
        check_audit_every(self.choices.audit_every)
        check_verify_every(self.choices.verify_every)

    def check(self, configuration: Configured) -> None:
        """Raises ConfigurationError if a guard cannot go along with what was chosen otherwise."""
        check_rate(self.choices.learning_rate, [rule.memory for rule in configuration.rules])

    def rolls_back(self, configuration: Configured) -> bool:
        """Whether a step that is not finite is taken back."""
        asked = self.choices.rollback
        if asked is not None:
            return asked
        if self.choices.grad_scaler is not None:
            return True
        return any(rule.memory.parts or rule.method.rolls_back for rule in configuration.rules)

    def guards(self, engine: Engine, parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> list[Guard]:
        """The guards, the outermost first: what is handed on is looked at last, what the method sees is audited."""
        choices, names = self.choices, [name for name, _ in parameters]
        guards: list[Guard] = [self.comparison(choices.verify_every)] if choices.verify_every else []
        if self.rolls_back(engine.configuration):
            dtypes = {name: parameter.dtype for name, parameter in parameters}
            guards.append(Rollback(engine, dtypes) if self.agree is None else Rollback(engine, dtypes, self.agree))
        if choices.grad_scaler is not None:
            guards.append(LossScale(choices.grad_scaler, engine.store))
        if choices.clip_spikes is not None:
            guards.append(Spikes(float(choices.clip_spikes), names, engine))
        if choices.learning_rate is not None:
            owing = lambda name: _owing(engine.configuration.rule(name))  # noqa: E731, which other choices may follow
            guards.append(LearningRate(choices.learning_rate, engine.store, owing))
        if choices.audit_every:
            unsent = lambda name: _unsent(engine.configuration.rule(name))  # noqa: E731
            guards.append(Auditor(choices.audit_every, names, engine, engine.rank, unsent))
        asked = [getattr(rule.method, "moments", "step") for rule in engine.configuration.rules]
        for moments in sorted({*asked} - {"step"}):
            guards.append(Unobserved(engine, moments, aloud=engine.rank == 0))
        return guards

    def close(self) -> None:
        """Leaves whoever was asked, once nothing is averaged any more."""
        if self.agree is not None:
            self.agree.close()

    def describe(self, configuration: Configured) -> dict[str, str]:
        """Everything that must be the same on all ranks, as text."""
        choices = self.choices
        scale = "none" if choices.grad_scaler is None else f"with scale {choices.grad_scaler.get_scale()}"
        return {
            "name": str(choices.name),
            "grad_scaler": scale,
            "rollback": str(self.rolls_back(configuration)),
            "learning_rate": "none" if choices.learning_rate is None else "given",
            "clip_spikes": str(choices.clip_spikes),
            "audit_every": str(choices.audit_every),
            "verify_every": str(choices.verify_every),
        }


def _owing(rule: Configuration) -> tuple[str, ...]:
    """The store's fields of what workers and owners owe: their memories', and the method's own."""
    memory = rule.memory
    return (*memory.owed("residual"), *memory.owner().owed("owner_residual"), *rule.method.owed)


def _check_name(name: object) -> None:
    """Raises ConfigurationError unless ``name`` is a text, or None."""
    if not (name is None or (isinstance(name, str) and name)):
        raise ConfigurationError(f"name={name!r} is no name; give a text such as 'critic', the same on all ranks")


def _unsent(rule: Configuration) -> tuple[str, ...]:
    """The store's fields of what a worker keeps because it was not sent, in whatever units; estimates are no such."""
    owed = (*rule.memory.owed("residual"), *rule.method.owed)
    return () if rule.memory.parts else tuple(dict.fromkeys(("residual", *owed)))
