"""Memories in units of the loss, whatever it is scaled by."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from gradwire.codecs.select.variance import SQUARES
from gradwire.deferred import known
from gradwire.engine.guards.guard import Guard
from gradwire.engine.unit import Unit
from gradwire.errors import ConfigurationError
from gradwire.memory import Store


class LossScale(Guard):
    """Divides gradients by the scale of the loss before they are compressed, and multiplies their average by it.

    So memories, thresholds and scales are those of the unscaled loss, and go on when the scale changes; the optimizer
    step, which unscales, sees what it expects. The scale is read once a step. Scales that are powers of two, as
    ``GradScaler`` has them by default, change no bit of what is not subnormal.

    Args:
        scaler: What scales the loss; with ``enabled=False`` the scale is 1.
        store: Where squares of scaled gradients may be kept, which are divided by the scale's square.
    """

    def __init__(self, scaler: torch.amp.GradScaler, store: Store) -> None:
        self._scaler = scaler
        self._store = store
        self._scale: Tensor | None = None

    def before_step(self) -> None:
        """Looks whether there is a scale.

        Raises:
            ConfigurationError: If the scaler has not scaled any loss.
        """
        if self._scaler.is_enabled() and self._scaler._scale is None:
            raise ConfigurationError(
                "grad_scaler has not scaled a loss yet; call grad_scaler.scale(loss).backward(), or attach without it"
            )

    def before_encode(self, unit: Unit, gradient: Tensor) -> None:
        """Divides by the scale."""
        if self._scale is None:
            scale = self._scaler._scale if self._scaler.is_enabled() else None
            self._scale = (
                torch.ones((), dtype=torch.float32) if scale is None else scale.clone()
            )  # the scaler changes its own in place
        if not known(self._scale == 1):
            gradient.div_(self._scale)
            for slot in unit.slots:
                if (squares := self._store.get(SQUARES, slot.name)) is not None:
                    squares.div_(self._scale).div_(self._scale)

    def after_decode(self, unit: Unit, average: Tensor) -> None:
        """Multiplies by the scale."""
        if self._scale is not None and not known(self._scale == 1):
            average.mul_(self._scale)

    def after_step(self) -> None:
        """The next step reads the scale anew."""
        self._scale = None

    def __str__(self) -> str:
        return f"loss scale {self._scaler.get_scale()}"


def check_scaled(scaler: torch.amp.GradScaler | None) -> None:
    """Raises ConfigurationError if gradients that are there may have been unscaled already."""
    states = [] if scaler is None else scaler._per_optimizer_states.values()
    if any(each["stage"] is OptState.UNSCALED for each in states):
        raise ConfigurationError(
            "grad_scaler has unscaled the gradients of an optimizer that has not stepped since, and gradients are "
            "averaged as they are scaled; call synchronize() before unscale_(), of all models before that of any"
        )


def check_scaler(scaler: object) -> None:
    """Raises ConfigurationError unless ``scaler`` is a ``torch.amp.GradScaler`` or None."""
    if not (scaler is None or isinstance(scaler, torch.amp.GradScaler)):
        raise ConfigurationError(
            f"grad_scaler is a {type(scaler).__name__}; give the torch.amp.GradScaler that scales the loss, or None"
        )
