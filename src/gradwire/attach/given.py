"""What is given to an attachment, parameters and a process group, and whether they will do."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from gradwire.errors import ConfigurationError
from gradwire.layout import GRADIENT_DTYPES
from gradwire.wire.sibling import backends_of, carrier_of

_log = logging.getLogger("gradwire")

PARAMETER_DTYPES = tuple(dtype for dtype in GRADIENT_DTYPES if dtype != torch.float64)
"""Of parameters that are averaged themselves, in float32: of float64 digits would be lost."""

Named = Sequence[tuple[str, torch.nn.Parameter]]


def named_by(optimizer: torch.optim.Optimizer) -> Named:
    """An optimizer's parameters, by the names it was given, or else by group and place."""
    named: list[tuple[str, torch.nn.Parameter]] = []
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names", [f"{number}.{index}" for index in range(len(group["params"]))])
        named += zip(names, group["params"], strict=True)
    return named


def check_named(given: object) -> Named:
    """Names and parameters as they were given.

    Raises:
        ConfigurationError: If they are anything else, such as parameters without names.
    """
    found: list[Any] = list(given) if isinstance(given, Iterable) and not isinstance(given, Mapping) else [given]
    for each in found:
        match each:
            case (str(), Tensor()):
                continue
        raise ConfigurationError(
            f"among the parameters given is a {type(each).__name__}; give a module, or names and parameters as its "
            "named_parameters() does"
        )
    return found


def check_parameters(parameters: Named, dtypes: Sequence[torch.dtype] = PARAMETER_DTYPES) -> None:
    """Raises ConfigurationError unless all can be averaged, or their gradients."""
    if not parameters:
        raise ConfigurationError("there are no parameters that require gradients; nothing can be averaged")
    device = parameters[0][1].device
    names: dict[int, str] = {}
    given: set[str] = set()
    for name, parameter in parameters:
        if name in given:
            raise ConfigurationError(
                f"two parameters have the name {name!r}; memories are kept by name, so give each its own, "
                "such as f'encoder.{name}'"
            )
        if id(parameter) in names:
            raise ConfigurationError(
                f"{name!r} is the parameter {names[id(parameter)]!r} under another name; give shared parameters once"
            )
        names[id(parameter)] = name
        given.add(name)
        if is_lazy(parameter):
            raise ConfigurationError(f"parameter {name!r} has no shape yet; have the model take a first batch before")
        if parameter.is_meta:
            raise ConfigurationError(f"parameter {name!r} is on the meta device; materialise the model first")
        if parameter.dtype not in dtypes:
            raise ConfigurationError(
                f"parameter {name!r} has dtype {parameter.dtype}; gradwire averages "
                f"{', '.join(str(dtype) for dtype in dtypes)} here; convert it, or average it yourself"
            )
        if parameter.device != device:
            raise ConfigurationError(
                f"parameter {name!r} is on {parameter.device}, {parameters[0][0]!r} on {device}; "
                "use one device a process"
            )


def check_left_out(frozen: Named) -> None:
    """Raises ConfigurationError if a parameter that required no gradient when the method was attached now does."""
    for name, parameter in frozen:
        if parameter.requires_grad:
            raise ConfigurationError(
                f"parameter {name!r} was frozen when the method was attached, so its gradient is not averaged and "
                "ranks would drift apart; to unfreeze it, call zero_grad(), then wrap the model and attach anew"
            )


def default_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    """The group given, that of a device mesh of one dimension, or the default one.

    Raises:
        ConfigurationError: If there is no process group yet, or what was given is none that this process is in.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigurationError(
            "there is no process group yet; call torch.distributed.init_process_group('gloo') (or 'nccl') first"
        )
    chosen: Any = dist.group.WORLD if group is None else group
    if isinstance(chosen, DeviceMesh):
        if chosen.ndim != 1:
            raise ConfigurationError(
                f"process_group is a device mesh of {chosen.ndim} dimensions; give one, such as mesh['dp']"
            )
        chosen = chosen.get_group() if chosen.get_coordinate() is not None else None
    if chosen in (None, dist.GroupMember.NON_GROUP_MEMBER):
        raise ConfigurationError("this process is not in the process group; attach on its members only")
    if not isinstance(chosen, dist.ProcessGroup):
        raise ConfigurationError(
            f"process_group is {chosen!r}; give a torch.distributed.ProcessGroup or a device mesh of one dimension"
        )
    return chosen


def check_backend(group: dist.ProcessGroup, device: torch.device) -> None:
    """Raises ConfigurationError if a group's backends can carry nothing of what is sent from tensors on ``device``.

    Where they do by way of the host's memory, a warning says so.
    """
    carrier = carrier_of(group, device)
    if carrier == device:
        return
    wanted = "'cpu:gloo,cuda:nccl'" if device.type == "cuda" else f"a backend for {device.type}"
    if carrier is None:
        raise ConfigurationError(
            f"the parameters are on {device} and the process group carries {' and '.join(backends_of(group))} tensors; "
            f"call init_process_group with {wanted}"
        )
    if group.rank() == 0:
        _log.warning(
            "the parameters are on %s, of which the process group carries too little by itself: all that is sent goes "
            "through the host's memory by gloo; where there is a backend for such tensors, call init_process_group "
            "with %s",
            *(device, wanted),
        )
