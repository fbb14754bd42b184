"""What a handle averages and among whom, which is what a state must have been saved of.

What a state should hold is found by laying the model out on the meta device, which takes no memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from gradwire.attach.given import Named
from gradwire.attach.shards import local, part_of
from gradwire.engine.engine import Engine
from gradwire.engine.mixture import Configured
from gradwire.engine.nodes import Nodes
from gradwire.errors import ConfigurationError
from gradwire.layout import Slot, flat_slots
from gradwire.memory import Store
from gradwire.state.form import Ranks, check_same
from gradwire.wire.transport import readable


@dataclass(frozen=True)
class Averaged:
    """Parameters, or pieces of them, and the workers.

    Attributes:
        parameters: What a state says of each, by name: shape, dtype, and of a DTensor which part this rank has.
        rank: This worker.
        ranks: The workers' in the default group.
        nodes: The nodes that they average in first; None if they do not.
    """

    parameters: Mapping[str, Mapping[str, Any]]
    rank: int
    ranks: Ranks
    nodes: Nodes | None

    @staticmethod
    def described(parameters: Named) -> dict[str, dict[str, Any]]:
        """Of each parameter what this rank has."""
        return {
            name: {"shape": list(local(each).shape), "dtype": str(each.dtype), **part_of(each)}
            for name, each in parameters
        }

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """By name."""
        return {name: tuple(each["shape"]) for name, each in self.parameters.items()}

    @cached_property
    def itemsizes(self) -> dict[str, int]:
        """Bytes of an element, by name."""
        dtypes = {name: each["dtype"].removeprefix("torch.") for name, each in self.parameters.items()}
        return {name: getattr(torch, dtype).itemsize for name, dtype in dtypes.items()}

    @property
    def slots(self) -> tuple[Slot, ...]:
        """All of them, one after the other."""
        return flat_slots(list(self.shapes.items()))

    def identity(self, configuration: Configured) -> dict[str, Any]:
        """As much of a state as a run that goes on from it must have in common."""
        return {
            "configuration": configuration.describe(),
            "parameters": self.parameters,
            "rank": self.rank,
            "world_size": len(self.ranks),
            "ranks": self.ranks,
        }

    def store(self, configuration: Configured) -> Store:
        """What is remembered once all has been averaged, without room for any of it."""
        nowhere = Engine(configuration, self.rank, len(self.ranks), torch.device("meta"), self.nodes)
        nowhere.unit(self.slots)
        return nowhere.store

    def check_stages(self, configuration: Configured) -> None:
        """Raises ConfigurationError if what is remembered at some time cannot be kept, or be saved together."""
        for stage in configuration.stages:
            self.store(stage)

    def check_room(self, configuration: Configured, device: torch.device, copies: int) -> None:
        """Raises ConfigurationError if a GPU has no room for what is remembered between steps, so many times."""
        if device.type != "cuda":
            return
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + unused
        wanted = copies * max(self.store(stage).nbytes for stage in configuration.stages)
        if wanted > free:
            raise ConfigurationError(
                f"what is remembered between steps takes {readable(wanted)} on {device}, where {readable(free)} are "
                f"free, with {configuration}{' and rollback, which keeps a copy' if copies > 1 else ''}; choose "
                "memory=gradwire.memory.Residual(dtype='bfloat16') for half a residual, inside='node' for a node's "
                "share of it, or memory='none'"
            )

    def check(self, state: Mapping[str, Any], configuration: Configured) -> None:
        """Raises ConfigurationError unless this worker saved the state, of the same model under the same choices."""
        check_same(state, self.identity(configuration), "this handle")
        theirs, workers = (state["rank"], state["world_size"]), len(self.ranks)
        if theirs[1] != workers:
            raise ConfigurationError(
                f"the state was saved by rank {theirs[0]} of {theirs[1]} workers, this is rank {self.rank} of "
                f"{workers}; gradwire.redistribute makes states for {workers} workers of those of all {theirs[1]}"
            )
        if theirs[0] != self.rank:
            raise ConfigurationError(
                f"the state was saved by rank {theirs[0]}, this is rank {self.rank}; load on each rank what it saved"
            )
        if state["ranks"] and tuple(state["ranks"]) != tuple(self.ranks):
            raise ConfigurationError(
                f"the state was saved by a worker of ranks {tuple(state['ranks'])}, this one's are {self.ranks}; load "
                "what this group saved; gradwire.redistribute makes states for any group of those of all workers"
            )
        now = configuration.at(state["step"] - state["dense_steps"])
        self.store(now).check(state["tensors"], complete=state["step"] > 0)
