"""Which function a tensor's device runs: its own, or the reference's where it has none."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import cache, wraps
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from gradwire.kernels.compensated import Compensated

P = ParamSpec("P")
R = TypeVar("R")

PACKAGES = {
    "cpu": ("gradwire.kernels.cpu", "numba"),
    "cuda": ("gradwire.kernels.gpu", "triton"),
    "meta": ("gradwire.kernels.meta", "torch"),
}
"""Where the kernels of a type of device are, and what compiles them.

A package has functions of the reference's names, and ``CODES``, what they encode. ROCm's devices are ``cuda`` to torch.
"""

OLDEST_GPU = (8, 0)
"""The lowest compute capability that Triton compiles for."""

KERNELS: dict[str, Callable[..., Any]] = {}
"""The reference's functions, by name."""


def by_device(reference: Callable[P, R]) -> Callable[P, R]:
    """Runs what the device of the first tensor has under the function's name, and the function itself if nothing."""
    name = reference.__name__
    coded = next(iter(inspect.signature(reference).parameters)) == "code"
    KERNELS[name] = reference

    @wraps(reference)
    def dispatched(*args: P.args, **kwargs: P.kwargs) -> R:
        device = next(each.device for each in map(_tensor, (*args, *kwargs.values())) if each is not None)
        own = overrides(device.type)
        if coded and type(args[0]) not in own.get("CODES", ()):
            return reference(*args, **kwargs)
        function: Callable[P, R] = own.get(name, reference)
        return function(*args, **kwargs)

    return dispatched


def _tensor(argument: Any) -> Tensor | None:
    """Of an argument, if there is one."""
    found = argument.gradient if isinstance(argument, Compensated) else argument
    return found if isinstance(found, Tensor) else None


@cache
def overrides(device: str) -> Mapping[str, Any]:
    """What a type of device offers, imported when the first of its tensors comes; nothing if it cannot be compiled.

    That is without the compiler, or with a GPU that is too old for it.

    Raises:
        ConfigurationError: If its kernels cannot be compiled as things are.
    """
    package, compiler = PACKAGES.get(device, ("", ""))
    possible = package and find_spec(compiler) and not (device == "cuda" and has_old_gpu())
    return vars(importlib.import_module(package)) if possible else {}


def has_old_gpu() -> bool:
    """Whether any GPU here is older than Triton's compiler knows."""
    if not torch.version.cuda or not torch.cuda.is_available():
        return False
    capabilities = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    return min(capabilities, default=OLDEST_GPU) < OLDEST_GPU


def by_reference(device: torch.device) -> tuple[str, ...]:
    """The kernels and codes that run by the reference on a device, which is slow."""
    from gradwire.kernels import codes

    own = overrides(device.type)
    missing = [name for name in KERNELS if name not in own]
    return (*missing, *(code.__name__ for code in codes.ALL if code not in own.get("CODES", ())))
