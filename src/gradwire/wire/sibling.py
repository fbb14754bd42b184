"""Process groups: which one, what it carries, and another of the same workers, so that collectives cannot mix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from gradwire.errors import ConfigurationError
from gradwire.wire.transport import timeout_of

_siblings = 0
"""Groups that this process has made, or knows others to have made."""


def sibling_of(group: dist.ProcessGroup, device: torch.device, some: Sequence[int] | None = None) -> dist.ProcessGroup:
    """Another group of the same ranks and backend, or of some of them; made by all members of the group.

    Its timeout is the group's; on other devices than the CPU twice that, since what the backend does then is to end the
    process: the wire is to find out before.
    """
    ranks, device = dist.get_process_group_ranks(group) if some is None else some, carrier_of(group, device) or device
    timeout = timeout_of(group)
    if timeout is not None and device.type != "cpu":
        timeout *= 2
    backends = set(backends_of(group).values())
    with _named(_new_name(group, ranks, device)), _by_itself():
        sibling = dist.new_group(
            list(ranks),
            timeout=timeout,
            backend=backends.pop() if len(backends) == 1 else str(dist.get_backend_config(group)),
            pg_options=_options_of(group, timeout),
            use_local_synchronization=True,
        )
    if not isinstance(sibling, dist.ProcessGroup):
        raise ConfigurationError("this process is not in the process group; attach on its members only")
    return sibling


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """The name of a group's backend for each type of device that it carries tensors of."""
    return dict(pair.split(":") for pair in str(dist.get_backend_config(group)).split(","))


def carrier_of(group: dist.ProcessGroup, device: torch.device) -> torch.device | None:
    """Where tensors must lie that a group is to send, of those on a device: there, or on the host; None if nowhere.

    Of others than the CPU's gloo carries all-reduces and broadcasts, and nothing else for sure.
    """
    backends = backends_of(group)
    if device.type == "cpu" or backends.get(device.type, "gloo") != "gloo":
        return device if device.type in backends else None
    return torch.device("cpu") if "cpu" in backends else None


def _options_of(group: dist.ProcessGroup, timeout: timedelta | None) -> Any:
    """NCCL's kernels are to go before those of backward, which would keep them waiting; other backends have none."""
    if "nccl" not in backends_of(group).values():
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if timeout is not None:
        options._timeout = timeout  # else torch warns that its own argument counts
    return options


def _new_name(group: dist.ProcessGroup, ranks: Sequence[int], device: torch.device) -> str:
    """A name that all members agree on, and that these ranks have never given to a group before."""
    global _siblings
    count = torch.tensor([_siblings], device=device)
    dist.all_reduce(count, dist.ReduceOp.MAX, group=group)
    _siblings = int(count) + 1
    return f"gradwire {_siblings} of {' '.join(map(str, ranks))}"


@contextmanager
def _by_itself() -> Iterator[None]:
    """Has the group that is made within a communicator of its own.

    Where ``init_process_group`` was given a ``device_id``, torch has NCCL split it off that of all ranks, which all of
    them must take part in: those in other groups, and those that attach nothing, would be waited for for ever.
    """
    everybody = distributed_c10d._get_default_group()
    device, everybody.bound_device_id = everybody.bound_device_id, None
    try:
        yield
    finally:
        everybody.bound_device_id = device


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Gives a name to the group that is made within.

    By itself torch names a group that its members make alone after the number of groups that each of them is in. Where
    that differs they wait for each other for ever; where it comes again they meet stale addresses.
    """
    theirs = distributed_c10d._process_group_name
    distributed_c10d._process_group_name = lambda ranks, use_hashed_name: name  # type: ignore[assignment, return-value]
    try:
        yield
    finally:
        distributed_c10d._process_group_name = theirs
