"""What ranks tell each other about their states."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from gradwire.errors import ConfigurationError
from gradwire.state.redistribution import redistribute

State = Mapping[str, Any]
"""What ``Handle.state_dict()`` returned."""

_NONE, _FAILED = -1, -2
"""What ranks tell each other in place of a step."""

_log = logging.getLogger("gradwire")


def workers() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def alone() -> None:
    """Says that nothing will be sent."""
    _log.warning("one process trains alone: nothing is sent, so nothing is compressed")


class Agreed:
    """Something that all ranks load, which each of them may fail to do; then all of them raise.

    Attributes:
        step: Of the state that this rank has loaded; None if there is none.
    """

    def __init__(self) -> None:
        self.step: int | None = None

    def __enter__(self) -> Agreed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            return
        told = _FAILED if error else _NONE if self.step is None else self.step
        steps = _all_gather(told)
        if error is None and any(each != told for each in steps):
            said = {_FAILED: "could not load its state", _NONE: "has no state"}
            raise ConfigurationError(
                "ranks would not go on from one step: "
                + ", ".join(f"rank {rank} {said.get(each, f'that of step {each}')}" for rank, each in enumerate(steps))
                + "; load what all ranks saved together"
            )


def of_all_ranks(states: Sequence[State]) -> list[list[State]]:
    """Every rank's states, by rank, on rank 0; nothing on the others. To be called on all ranks."""
    buffer = io.BytesIO()
    torch.save(list(states), buffer)
    mine = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    sizes = _all_gather(len(mine))
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=_device())
    padded[: len(mine)] = mine
    came = [torch.empty_like(padded) for _ in sizes] if dist.get_rank() == 0 else None
    dist.gather(padded, came, dst=0)
    return [
        torch.load(io.BytesIO(each[:size].cpu().numpy().tobytes()), weights_only=True)
        for each, size in zip(came or (), sizes, strict=False)
    ]


def own(saved: Sequence[Sequence[State]]) -> list[State]:
    """This rank's states out of those of all ranks that were; made anew if there are more or fewer now."""
    if len(saved) == workers():
        return list(saved[dist.get_rank()])
    return [redistribute(states, workers())[dist.get_rank()] for states in zip(*saved, strict=True)]


def _all_gather(number: int) -> list[int]:
    mine = torch.tensor([number], device=_device())
    numbers = [torch.empty_like(mine) for _ in range(workers())]
    dist.all_gather(numbers, mine)
    return [int(each) for each in numbers]


def _device() -> str:
    """Where the default group's collectives take their tensors from."""
    return str(distributed_c10d._get_object_coll_device())
