"""What other libraries wrap around models and optimizers: what is inside is what counts."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

_INNER_MODULES = ("_orig_mod", "_forward_module")
"""Where ``torch.compile`` and Lightning Fabric keep the module whose ``forward`` they call."""


def unwrapped_model(model: nn.Module) -> nn.Module:
    """The module inside those that compile it, cast its inputs or the like."""
    inner = next((each for name, each in model.named_children() if name in _INNER_MODULES), None)
    return model if inner is None else unwrapped_model(inner)


def parameters_of(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """A module's parameters, each once, by the names that they have where nothing within it is compiled."""
    named = [(name.split("."), each) for name, each in module.named_parameters()]
    return [(".".join(part for part in parts if part not in _INNER_MODULES), each) for parts, each in named]


def unwrapped_optimizer(optimizer: Any) -> Any:
    """The optimizer whose steps are taken, of one that hands them on: Accelerate's, Lightning's and others like them.

    An optimizer that has another inside and step hooks of its own is left as it is.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer) and (
        not isinstance(optimizer, Optimizer) or _step_hooks(optimizer) in (None, _step_hooks(inner))
    ):
        optimizer = inner
    return optimizer


def _step_hooks(optimizer: Optimizer) -> int | None:
    hooks = getattr(optimizer, "_optimizer_step_post_hooks", None)
    return None if hooks is None else id(hooks)
