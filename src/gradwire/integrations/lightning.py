"""Lightning and Fabric: a callback that attaches a method, logs it, and keeps its state in checkpoints."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.attach.wrappers import unwrapped_model
from gradwire.engine import Methods
from gradwire.engine.recipes import RECIPE
from gradwire.errors import ConfigurationError, GradwireError
from gradwire.integrations.attachment import Attachment
from gradwire.state.ranks import Agreed, State, of_all_ranks, own, workers

try:
    from lightning.pytorch import Callback
except ImportError as error:
    raise ImportError(f"{error}; Lightning comes with pip install 'gradwire[lightning]'") from error

_log = logging.getLogger("gradwire")


class GradwireCallback(Callback):  # type: ignore[misc]
    """Averages the gradients of a DDP model through a compression method.

    For a ``Trainer``, with ``strategy="ddp"``: what the method remembers is in every checkpoint, of all ranks together,
    and a run that goes on from one gives the same bits; one of another number of workers gets what
    :func:`gradwire.redistribute` makes of it. A second ``fit`` of a module goes on with what is remembered, and one of
    another module starts empty. Figures are logged whenever Lightning logs. The scaler of ``precision="16-mixed"`` is
    handed on.

    For ``Fabric(callbacks=...)``: the models that ``fabric.setup`` wraps are attached to, and the callback is saved and
    loaded as ``{"model": model, "gradwire": callback}`` is. Log ``callback.attachment.figures()``.

    Args:
        method: See :func:`gradwire.compress`.
        **options: See there.

    Attributes:
        attachment: Counters and handles.

    Raises:
        ConfigurationError: When training starts, as :func:`gradwire.compress` does, or if the strategy is not DDP's.

    Example::

        trainer = Trainer(strategy="ddp", callbacks=[GradwireCallback("acpsgd", rank=4)])
    """

    def __init__(self, method: Methods = RECIPE, **options: Any) -> None:
        self.attachment = Attachment(method, options)
        self._saved: list[list[State]] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attaches to the model that the strategy has just wrapped."""
        if sum(isinstance(each, GradwireCallback) for each in trainer.callbacks) > 1:
            raise ConfigurationError("the trainer has several GradwireCallbacks; DDP takes one hook, so give one")
        again = self.attachment.averages(pl_module) and not self._saved
        states = self._remembered() if again else []
        pl_module.zero_grad()  # of an earlier fit
        self.attachment.close()
        self._attach(trainer.strategy.model, trainer.strategy, getattr(trainer.precision_plugin, "scaler", None))
        self._go_on()
        if again and self.attachment.handles:
            self._restore(states)

    def on_after_setup(self, fabric: Any, module: nn.Module) -> None:
        """Attaches to a model that Fabric has just wrapped."""
        self._attach(module, fabric.strategy, getattr(fabric.strategy.precision, "scaler", None))
        if self._saved and len(self.attachment.handles) in (0, len(self._saved[0])):
            self._go_on()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Logs figures of this rank."""
        if trainer.global_step % trainer.log_every_n_steps == 0 and self.attachment.handles:
            pl_module.log_dict(self.attachment.figures())

    def state_dict(self) -> dict[str, Any]:
        """What the method remembers on all ranks, on rank 0, which writes the checkpoint; to be called on all."""
        return {"ranks": of_all_ranks(self.attachment.state())} if self.attachment.handles else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from what :meth:`state_dict` returned on rank 0; on all ranks, at once or when models are wrapped.

        Where there were no models to remember anything of, memories start empty, and a warning says so.
        """
        self._saved = state_dict.get("ranks", [])
        if self.attachment.handles:
            self._go_on()
        if "ranks" not in state_dict and workers() > 1:
            self.attachment.forget()
            if dist.get_rank() == 0:
                _log.warning("the checkpoint has no states of gradwire: what compression remembers starts empty")

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Told of a checkpoint of Lightning's, which hands no state on where it has none."""
        if trainer.state.fn == "fit" and not checkpoint["callbacks"].get(self.state_key):
            self.load_state_dict({})

    def _go_on(self) -> None:
        """Restores what was loaded, if anything was."""
        saved, self._saved = self._saved, []
        if saved and self.attachment.handles:
            self._restore(own(saved))
        elif saved:
            _log.warning("the checkpoint has states of gradwire; a process that trains alone leaves them out")

    def _remembered(self) -> list[State]:
        """What an earlier fit left, or nothing if an exception ended it within a step."""
        try:
            return self.attachment.state()
        except GradwireError:
            if dist.get_rank() == 0:
                _log.warning("an earlier fit ended within a step: what compression remembers starts empty")
            return []

    def _restore(self, states: list[State]) -> None:
        with Agreed() as agreed:
            if states:
                self.attachment.restore(states)
                agreed.step = self.attachment.handles[0].engine.step

    def _attach(self, model: nn.Module, strategy: Any, scaler: torch.amp.GradScaler | None) -> None:
        inner = unwrapped_model(model)
        if not isinstance(inner, DistributedDataParallel) and workers() > 1:
            raise ConfigurationError(
                f"{type(strategy).__name__} makes a {type(inner).__name__}, whose averages are not DDP's; choose "
                "strategy='ddp'"
            )
        self.attachment.attach(model, grad_scaler=scaler)
