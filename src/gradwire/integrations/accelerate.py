"""Accelerate: the models that an ``Accelerator`` prepares average through a method."""

from __future__ import annotations

from typing import Any

from torch import nn

from gradwire.engine import Methods
from gradwire.engine.recipes import RECIPE
from gradwire.errors import ConfigurationError
from gradwire.integrations.attachment import Attachment
from gradwire.state.ranks import alone

try:
    from accelerate import Accelerator, DistributedType
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
except ImportError as error:
    raise ImportError(f"{error}; Accelerate comes with pip install 'gradwire[accelerate]'") from error

_WITHOUT_DDP = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA")


def compress(accelerator: Accelerator, method: Methods = RECIPE, **options: Any) -> Attachment:
    """Averages the gradients of all models that are prepared from now on through a compression method.

    ``save_state`` and ``load_state`` take along what the method remembers, a file a rank: a run that goes on gives the
    same bits, and one of another number of workers what :func:`gradwire.redistribute` makes of it. A gradient scaler of
    the accelerator's is handed on.

    Args:
        accelerator: To be given before ``prepare``, on every rank.
        method: See :func:`gradwire.compress`.
        **options: See there.

    Returns:
        The counters and handles of what is attached.

    Raises:
        ConfigurationError: If a model is prepared already, a method attached or another communication hook asked for,
            or the accelerator does not train with DDP; nothing is changed. From ``prepare``, what
            :func:`gradwire.compress` raises.

    Example::

        attachment = gradwire.integrations.accelerate.compress(accelerator, "acpsgd", rank=4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    """
    if not isinstance(accelerator, Accelerator):
        raise ConfigurationError(f"accelerator is a {type(accelerator).__name__}; give an accelerate.Accelerator")
    if accelerator._models:
        raise ConfigurationError(
            "the accelerator has prepared a model already, whose hooks are settled; compress before accelerator.prepare"
        )
    attachment = Attachment(method, options)
    attach_through(accelerator, attachment)
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: attachment.save(folder))
    accelerator.register_load_state_pre_hook(lambda models, folder: attachment.load(folder))
    return attachment


def attach_through(accelerator: Accelerator, attachment: Attachment) -> None:
    """Attaches to every DDP model that the accelerator makes, and lets go of those that it has freed.

    Raises:
        ConfigurationError: If it has a hook already, or makes no DDP models; nothing is changed.
    """
    kind, theirs = accelerator.distributed_type, accelerator.ddp_handler or DistributedDataParallelKwargs()
    if kind.value in _WITHOUT_DDP:
        raise ConfigurationError(
            f"the accelerator trains with {kind.value}, whose averages are not DDP's; compress under DDP, which "
            "Accelerate takes where no plugin is given"
        )
    if hasattr(theirs, "attaches"):
        raise ConfigurationError("the accelerator has a method of gradwire's already; compress once an accelerator")
    if theirs.comm_hook != DDPCommunicationHookType.NO:
        raise ConfigurationError(
            f"DistributedDataParallelKwargs asks for comm_hook={theirs.comm_hook.value!r}; DDP takes one hook, so "
            "leave that out"
        )

    class Attaching(DistributedDataParallelKwargs):  # type: ignore[misc]
        """The same arguments for DDP; a class of its own, as Accelerate copies all that an instance has."""

        attaches = True

        def register_comm_hook(self, model: nn.Module) -> None:
            """Accelerate calls this with what it has just wrapped."""
            if len(accelerator._models) == 1:  # this one; others there were have been freed
                attachment.close()
            attachment.attach(model, grad_scaler=accelerator.scaler)

    accelerator.ddp_handler = Attaching()
    vars(accelerator.ddp_handler).update(vars(theirs))
    if kind is DistributedType.NO:
        alone()
