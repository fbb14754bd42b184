"""Transformers: a ``Trainer`` averages through a method, saves and logs it."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

from gradwire.engine import Methods
from gradwire.engine.recipes import RECIPE
from gradwire.errors import ConfigurationError
from gradwire.integrations.attachment import Attachment
from gradwire.state.ranks import workers

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint
except ImportError as error:
    raise ImportError(f"{error}; Transformers comes with pip install 'gradwire[transformers]'") from error

from gradwire.integrations.accelerate import attach_through  # no Trainer is made without Accelerate


def compress(trainer: Trainer, method: Methods = RECIPE, **options: Any) -> Attachment:
    """Averages the gradients of a trainer's model through a compression method.

    What the method remembers is saved in ``checkpoint-N``, a file a rank, and read where ``train`` resumes: a run that
    goes on gives the same bits, and one of another number of workers what :func:`gradwire.redistribute` makes of it.
    Not in hyper-parameter searches, nor with ``save_only_model=True``. A second ``train()`` goes on with what is
    remembered, unless the trainer makes a new model for it. Training logs have the attachment's figures, of rank 0.

    Args:
        trainer: Before its first ``train()``, on every rank.
        method: See :func:`gradwire.compress`.
        **options: See there.

    Returns:
        The counters and handle of what is attached.

    Raises:
        ConfigurationError: If the trainer has wrapped its model already, a method is attached or another communication
            hook asked for, or it does not train with DDP; nothing is changed. From ``train``, what
            :func:`gradwire.compress` raises.

    Example::

        attachment = gradwire.integrations.transformers.compress(trainer, "topk", ratio=0.01)
        trainer.train()
    """
    if not isinstance(trainer, Trainer):
        raise ConfigurationError(f"trainer is a {type(trainer).__name__}; give a transformers.Trainer")
    if trainer.model_wrapped is not trainer.model:
        raise ConfigurationError("the trainer has wrapped its model already; compress before the first train()")
    attachment = Attachment(method, options)
    attach_through(trainer.accelerator, attachment)
    trainer._wrap_model = _attaching(trainer._wrap_model, trainer.accelerator, attachment)
    callback = _Checkpoints(attachment)
    trainer.callback_handler.callbacks.insert(0, callback)  # before those that report logs
    trainer.train = callback.told_of(trainer.train)
    trainer._save_checkpoint = callback.adding_to(trainer._save_checkpoint, trainer)
    return attachment


def _attaching(wrap: Any, accelerator: Any, attachment: Attachment) -> Any:
    """The trainer's ``_wrap_model``, which before 5.3 gives the accelerator other arguments for DDP."""

    @wraps(wrap)
    def wrapping(model: Any, training: bool = True, *args: Any, **kwargs: Any) -> Any:
        if training:  # the trainer clears gradients, too, when it has wrapped: of another batch size that it tried
            model.zero_grad()
        model = wrap(model, training, *args, **kwargs)
        if not hasattr(accelerator.ddp_handler, "attaches"):
            attach_through(accelerator, attachment)
        return model

    return wrapping


class _Checkpoints(TrainerCallback):  # type: ignore[misc]
    """Saves, loads and logs with the trainer."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self._resumes_from: str | bool | None = None

    def told_of(self, train: Any) -> Any:
        """The trainer's ``train``, which alone knows where it resumes."""

        @wraps(train)
        def resuming(resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
            self._resumes_from = resume_from_checkpoint
            return train(resume_from_checkpoint, *args, **kwargs)

        return resuming

    def adding_to(self, save: Any, trainer: Trainer) -> Any:
        """The trainer's saving of a checkpoint, and of this rank's file; at a SIGTERM ``on_save`` is not called."""

        @wraps(save)
        def saving(*args: Any, **kwargs: Any) -> None:
            save(*args, **kwargs)
            if not (trainer.args.save_only_model or trainer.state.is_hyper_param_search):
                self._attachment.save(Path(trainer.args.output_dir, f"checkpoint-{trainer.state.global_step}"))

        return saving

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Goes on from the checkpoint, when the model has been wrapped."""
        if workers() > 1 and not self._attachment.handles:
            raise ConfigurationError(
                "the trainer trains a model that is not wrapped in DDP, as after evaluate() or predict() before "
                "the first train(), so ranks would drift apart; evaluate after training, or with another Trainer"
            )
        folder = get_last_checkpoint(args.output_dir) if self._resumes_from is True else self._resumes_from
        self._resumes_from = None
        if folder:
            self._attachment.load(folder)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        """Adds figures to the logs of training."""
        if "loss" in logs:
            figures = self._attachment.figures()
            logs.update(figures)
            state.log_history[-1].update(figures)
