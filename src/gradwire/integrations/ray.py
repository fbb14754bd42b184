"""Ray Train: a model that ``prepare_model`` wrapped averages through a method, and goes on from a checkpoint."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.attach.wrappers import unwrapped_model
from gradwire.engine import Methods
from gradwire.engine.recipes import RECIPE
from gradwire.errors import ConfigurationError
from gradwire.integrations.attachment import Attachment
from gradwire.state.ranks import workers

try:
    from ray.train import get_checkpoint
except ImportError as error:
    raise ImportError(f"{error}; Ray Train comes with pip install 'gradwire[ray]'") from error


def compress(model: nn.Module, method: Methods = RECIPE, **options: Any) -> Attachment:
    """Averages a prepared model's gradients through a compression method, within ``train_loop_per_worker``.

    Where Ray starts the loop with a checkpoint, after a failure or to go on with an earlier run, what the method
    remembered is read from it: the same bits with as many workers, with another number what
    :func:`gradwire.redistribute` makes of it. Call ``attachment.save(folder)`` on every worker before all of them
    report that folder as a checkpoint, which Ray merges, and report ``attachment.figures()`` with the metrics.

    Args:
        model: What ``ray.train.torch.prepare_model`` returned, on every worker, before the first backward pass.
        method: See :func:`gradwire.compress`.
        **options: See there.

    Returns:
        The counters, handle and state of what is attached.

    Raises:
        ConfigurationError: If the model is not prepared for DDP, or as :func:`gradwire.compress` does; or if the
            checkpoint's states do not fit.

    Example::

        model = ray.train.torch.prepare_model(model)
        attachment = gradwire.integrations.ray.compress(model, "acpsgd", rank=4)
        ...
        attachment.save(folder)
        ray.train.report({**metrics, **attachment.figures()}, checkpoint=Checkpoint.from_directory(folder))
    """
    inner = unwrapped_model(model) if isinstance(model, nn.Module) else model
    if workers() > 1 and not isinstance(inner, DistributedDataParallel):
        raise ConfigurationError(
            f"model is a {type(inner).__name__}; give what ray.train.torch.prepare_model(model) returned, with its "
            "parallel_strategy='ddp'"
        )
    checkpoint = get_checkpoint()
    attachment = Attachment(method, options)
    attachment.attach(model)
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            attachment.load(folder)
    return attachment
