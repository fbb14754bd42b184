"""What is given to an attachment, parameters and a process group, and whether they will do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gradwire.attach.sibling import backends_of
from gradwire.errors import ConfigurationError

GRADIENT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Named = Sequence[tuple[str, torch.nn.Parameter]]


def named_by(optimizer: torch.optim.Optimizer) -> Named:
    """An optimizer's parameters that require gradients, by the names it was given, or else by group and place."""
    named: list[tuple[str, torch.nn.Parameter]] = []
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names", [f"{number}.{index}" for index in range(len(group["params"]))])
        named += [(name, each) for name, each in zip(names, group["params"], strict=True) if each.requires_grad]
    return named


def check_parameters(parameters: Named) -> None:
    """Raises ConfigurationError unless all gradients can be averaged."""
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
        if parameter.is_meta:
            raise ConfigurationError(f"parameter {name!r} is on the meta device; materialise the model first")
        if parameter.dtype not in GRADIENT_DTYPES:
            raise ConfigurationError(
                f"parameter {name!r} has dtype {parameter.dtype}; gradwire averages gradients of "
                f"{', '.join(str(dtype) for dtype in GRADIENT_DTYPES)}; convert it, or average it yourself"
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


def check_trained(optimizer: torch.optim.Optimizer, named: Named, *, moved: bool) -> None:
    """Raises ConfigurationError unless an optimizer trains what it did when averaging began.

    Args:
        optimizer: Whose parameters were averaged then.
        named: Those that required gradients.
        moved: Whether averages go on moving what is frozen, by momentum.
    """
    known = {id(each) for _, each in named}
    if left_out := [name for name, each in named_by(optimizer) if id(each) not in known]:
        raise ConfigurationError(
            f"the optimizer has parameters that it did not train when averaging began: {', '.join(left_out[:5])}; they "
            "are in no average; where you add or unfreeze some, close what averages, and attach anew with all of them"
        )
    if moved and (frozen := [name for name, each in named if not each.requires_grad]):
        raise ConfigurationError(
            f"parameters were trained when averaging began and are frozen now: {', '.join(frozen[:5])}; momentum would "
            "go on moving them; close what averages, and attach anew with what is to be trained"
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
    """Raises ConfigurationError unless a group's backend carries all that is sent from tensors on ``device``."""
    backends = backends_of(group)
    backend = backends.get(device.type)
    if backend is None or (backend == "gloo" and device.type != "cpu"):
        carries = "carries " + " and ".join(backends) if backend is None else f"has gloo for {device.type}"
        more = "" if backend is None else ", which carries all-reduces and broadcasts of them and nothing else"
        wanted = "'nccl', or 'cpu:gloo,cuda:nccl'" if device.type == "cuda" else f"a backend for {device.type}"
        raise ConfigurationError(
            f"the parameters are on {device} and the process group {carries} tensors{more}; "
            f"call init_process_group with {wanted}"
        )
