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

BY_THE_CPU = {
    "collect_local_maxima",
    "deadzone_decode",
    "deadzone_dither",
    "deadzone_encode",
    "deadzone_scales",
    "deadzone_step",
    "gaps_decode",
    "gaps_encode",
    "quantile_decode",
    "quantile_encode",
    "sketch",
    "sketch_estimates",
    "zero_runs_decode",
    "zero_runs_encode",
}
"""Kernels whose reference goes from value to value.

A device that waits for the host at each of them would take minutes, so where it has none of its own the CPU's do it, on
copies: the same bits.
"""

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
        if name not in own and name in BY_THE_CPU and device.type != "cpu":
            staged: R = _on_copies(overrides("cpu")[name], device, args, kwargs)
            return staged
        function: Callable[P, R] = own.get(name, reference)
        return function(*args, **kwargs)

    return dispatched


def _on_copies(
    function: Callable[..., Any], device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Has the CPU do it; the host waits for the device."""
    copies: list[tuple[Tensor, Tensor]] = []

    def brought(tensor: Tensor) -> Tensor:
        copies.append((tensor, tensor.cpu()))
        return copies[-1][1]

    given, options = (_moved(each, brought) for each in (args, tuple(kwargs.values())))
    answer = function(*given, **dict(zip(kwargs, options, strict=True)))
    for tensor, copy in copies:
        tensor.copy_(copy)
    return _moved(answer, lambda each: each.to(device))


def _moved(value: Any, move: Callable[[Tensor], Tensor]) -> Any:
    """A value with all its tensors moved."""
    if isinstance(value, Tensor):
        return move(value)
    if isinstance(value, Compensated):
        return Compensated(*(_moved(each, move) for each in value))
    return tuple(_moved(each, move) for each in value) if isinstance(value, tuple) else value


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


def shortcoming(device: torch.device) -> str:
    """Why nothing is compiled for a device, and the remedy; empty if something is."""
    if overrides(device.type):
        return ""
    _, compiler = PACKAGES.get(device.type, ("", ""))
    if not compiler:
        why, remedy = "there are no kernels for such devices", "train on a GPU of CUDA or ROCm, or on the CPU"
    elif not find_spec(compiler):
        why, remedy = f"{compiler.capitalize()} is not installed", "pip install 'gradwire[gpu]'"
    else:
        why = f"a GPU here has a compute capability below {'.'.join(map(str, OLDEST_GPU))}, where kernels begin"
        remedy = "hide it by CUDA_VISIBLE_DEVICES if others are to train, or take 'bf16', which needs no kernels"
    return (
        f"on {device} the reference runs, as hundreds of small operations a tensor, in place of compiled kernels: "
        f"{why}; {remedy}"
    )


def by_reference(device: torch.device) -> tuple[str, ...]:
    """The kernels and codes that a device has not: the reference runs there, slowly, or the CPU on copies."""
    from gradwire.kernels import codes

    own = overrides(device.type)
    missing = [name for name in KERNELS if name not in own]
    return (*missing, *(code.__name__ for code in codes.ALL if code not in own.get("CODES", ())))
