"""DTensors: every rank averages the part that it holds, over the ranks that hold the same part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from gradwire.errors import ConfigurationError
from gradwire.wire import ProcessGroupTransport


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor, of which this rank may hold a part."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: its own memory."""
    if not is_sharded(tensor):
        return tensor
    part: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return part


def local_parameters(parameters: Sequence[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
    """Parameters, a new one in place of each DTensor: what this rank holds of it, in the same memory."""
    return [(name, nn.Parameter(local(each)) if is_sharded(each) else each) for name, each in parameters]


def placed_as(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient in its parameter's placements; a DTensor that has others is redistributed over its own mesh."""
    if not is_sharded(parameter) or gradient.placements == parameter.placements:  # type: ignore[attr-defined]
        return gradient
    moved: Tensor = gradient.redistribute(parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]
    return moved


def part_of(parameter: Tensor) -> dict[str, str]:
    """Says which part of a parameter this rank holds, under the key ``part``; nothing where it holds all of it.

    How many replicas there are is no part of it.
    """
    cuts = [f"{place} {number} of {count}" for _, place, number, count in _cuts(parameter)]
    return {"part": f"{', '.join(cuts)} of {tuple(parameter.shape)}"} if cuts else {}


def check_replicas(parameters: Sequence[tuple[str, nn.Parameter]], group: dist.ProcessGroup) -> None:
    """Raises ConfigurationError if a group of workers has ranks that hold different parts of a parameter."""
    workers = set(dist.get_process_group_ranks(group))
    for name, parameter in parameters:
        for cut, _, _, _ in _cuts(parameter):
            ranks = dist.get_process_group_ranks(cut)
            if len(both := sorted(workers & set(ranks))) > 1:
                raise ConfigurationError(
                    f"parameter {name!r} is cut over ranks {ranks}, and the process group averages over "
                    f"{sorted(workers)}: ranks {both} hold different parts of it; give the group of its replicas, "
                    "such as process_group=mesh['replicate']"
                )


def cut_groups(parameters: Sequence[tuple[str, nn.Parameter]]) -> list[dist.ProcessGroup]:
    """The groups over which any parameter is cut, in the same order on all ranks."""
    found = {group.group_name: group for _, each in parameters for group, _, _, _ in _cuts(each)}
    return [group for group in found.values() if group.size() > 1]


class Agreement:
    """Says whether all ranks that hold other parts of the same model found a step good.

    Args:
        groups: Over which parameters are cut, one after the other; nothing else may use them.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._transports = [ProcessGroupTransport(group) for group in groups]

    def __call__(self, good: Tensor) -> Tensor:
        """Whether what is true here is true on all of them."""
        bad = good.logical_not().int()
        for transport in self._transports:
            bad = transport.all_reduce(bad, dist.ReduceOp.MAX)()
        return bad == 0

    def close(self) -> None:
        """Destroys the groups."""
        for transport in self._transports:
            transport.close()


def _cuts(parameter: Tensor) -> list[tuple[dist.ProcessGroup, str, int, int]]:
    """Of each dimension of the mesh over which a DTensor is cut: its group, how, this rank's place, and how many."""
    if not is_sharded(parameter):
        return []
    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    return [
        (mesh.get_group(dim), repr(place), mesh.get_local_rank(dim), mesh.size(dim))
        for dim, place in enumerate(parameter.placements)  # type: ignore[attr-defined]
        if not place.is_replicate()
    ]
