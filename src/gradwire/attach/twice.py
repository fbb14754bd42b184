"""Gradients that are averaged twice: what is lost in compressing them would be lost twice, and nothing would tell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any
from weakref import ref

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gradwire.attach.given import Named
from gradwire.attach.handle import Handle
from gradwire.attach.shards import local
from gradwire.codecs.untouched import version
from gradwire.errors import ConfigurationError

_HOOKED: MutableMapping[Tensor, ref[Handle]] = WeakTensorKeyDictionary()
"""By parameter: what averages its gradient in every backward pass."""

_AVERAGED: MutableMapping[Tensor, tuple[Any, ...]] = WeakTensorKeyDictionary()
"""Of the first gradient of a step: what was called to average it, its version then, and the workers."""


def hooked(handle: Handle, parameters: Named) -> None:
    """Notes that gradients are averaged in the backward pass, from now until the handle is closed."""
    _HOOKED.update((parameter, ref(handle)) for _, parameter in parameters)


def averaged(handle: Handle, gradients: Iterable[Tensor]) -> None:
    """Notes that these gradients hold averages as they are."""
    for first in list(gradients)[:1]:
        _AVERAGED[first] = ref(handle), version(local(first)), tuple(handle.averaged.ranks)


def check_not_averaged(
    handle: Handle, parameters: Iterable[tuple[str, Tensor]], gradients: Mapping[str, Tensor]
) -> None:
    """Raises ConfigurationError if what is open averages these gradients by itself, or has just been called to.

    Args:
        handle: What is to average them; over other workers it may.
        parameters: Whose gradients they are.
        gradients: By the parameter's name.
    """
    ranks = tuple(handle.averaged.ranks)
    for name, parameter in parameters if _HOOKED else ():
        hook = _HOOKED.get(parameter, _nothing)()
        if hook is not None and hook.attached and len({*ranks}.intersection(hook.averaged.ranks)) > 1:
            raise ConfigurationError(
                f"the gradient of {name!r} is averaged by gradwire.compress in the backward pass, and would be "
                "averaged again over the same workers; leave out one of them, or close() the handle of "
                "gradwire.compress and wrap the model in DDP no more"
            )
    for name, first in list(gradients.items())[:1]:
        by, *when = _AVERAGED.get(first, (ref(handle),))
        other: Handle | None = by()
        if other is not None and other is not handle and other.attached and when == [version(local(first)), ranks]:
            raise ConfigurationError(
                f"the gradient of {name!r} has been averaged by another Synchronizer over the same workers, and "
                "nothing came to it since; call one of them in a step"
            )


def _nothing() -> None:
    return None
