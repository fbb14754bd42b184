"""Which function a tensor's device runs: its own, or the reference's where it has none."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
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
    "collect_local_maxima": {"source"},
    "deadzone_decode": {"out"},
    "deadzone_dither": {"out"},
    "deadzone_encode": {"values", "payload"},
    "deadzone_sample": set(),
    "deadzone_scales": {"source"},
    "deadzone_step": set(),
    "gaps_decode": {"positions"},
    "gaps_encode": {"classes", "low"},
    "quantile_decode": {"out"},
    "quantile_encode": {"source", "payload"},
    "sketch": {"table"},
    "sketch_estimates": {"out"},
    "zero_runs_decode": {"trits"},
    "zero_runs_encode": {"coded"},
}
"""Kernels whose reference goes from value to value, and which of their arguments they write; of a source the residual.

A device that waits for the host at each of them would take minutes, so where it has none of its own the CPU's do it, on
copies: the same bits.
"""

KERNELS: dict[str, Callable[..., Any]] = {}
"""The reference's functions, by name."""


def by_device(reference: Callable[P, R]) -> Callable[P, R]:
    """Runs what the device of the first tensor has under the function's name, and the function itself if nothing."""
    name, parameters = reference.__name__, inspect.signature(reference).parameters
    coded = next(iter(parameters)) == "code"
    KERNELS[name] = reference

    @wraps(reference)
    def dispatched(*args: P.args, **kwargs: P.kwargs) -> R:
        device = _device(args, kwargs)
        own = overrides(device.type)
        if coded and type(args[0]) not in own.get("CODES", ()):
            return reference(*args, **kwargs)
        if name not in own and name in BY_THE_CPU and device.type != "cpu":
            given = dict(zip(parameters, args, strict=False)) | kwargs
            staged: R = _on_copies(overrides("cpu")[name], device, given, BY_THE_CPU[name])
            return staged
        function: Callable[P, R] = own.get(name, reference)
        return function(*args, **kwargs)

    return dispatched


def for_each(name: str, code: object, device: torch.device) -> Callable[..., None] | None:
    """What a device does with several blocks in one launch, as ``encode_each``; None if it takes them one by one."""
    return at_once(name, device) if type(code) in overrides(device.type).get("CODES", ()) else None


def at_once(name: str, device: torch.device) -> Callable[..., Any] | None:
    """What a device does with all matrices in one launch, as ``write_products``; None if it takes them one by one."""
    found: Callable[..., Any] | None = overrides(device.type).get(name)
    return found


def _on_copies(function: Callable[..., Any], device: torch.device, given: dict[str, Any], written: set[str]) -> Any:
    """Has the CPU do it, and brings back what it wrote; the host waits for the device."""
    copies = {name: _moved(value, Tensor.cpu) for name, value in given.items()}
    answer = function(**copies)
    for name in written:
        target, copy = given[name], copies[name]
        if isinstance(target, Compensated):
            target, copy = target.residual, copy.residual
        if target is not None:
            target.copy_(copy)
    return _moved(answer, lambda each: each.to(device))


def _moved(value: Any, move: Callable[[Tensor], Tensor]) -> Any:
    """A value with all its tensors moved."""
    if isinstance(value, Tensor):
        return move(value)
    if not isinstance(value, tuple):
        return value
    moved = [_moved(each, move) for each in value]
    return type(value)(*moved) if hasattr(value, "_fields") else tuple(moved)


def _device(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device:
    """Of the first tensor; a loop, as small tensors take no longer than a generator."""
    for each in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(each, Tensor):
            return each.device
        if isinstance(each, Compensated):
            return each.gradient.device
    raise TypeError("a kernel was given no tensor")


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
