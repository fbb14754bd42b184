"""What every published method is: hyper-parameters, a citation, and what it does with a gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradwire.codec import Codec, LinearCodec
from gradwire.layout import Block, Slot
from gradwire.memory import Feedback, Memory, Store
from gradwire.randomness import SHARED, key_of
from gradwire.routes import allreduce, gather, sharded
from gradwire.routes.sharded import Shards
from gradwire.wire.requests import Request, Synchronization, lockstep


@dataclass(frozen=True, eq=False)
class Site:
    """Where a method works: one block, on one rank.

    Attributes:
        block: Which elements of the flat gradient buffer.
        numel: Elements of that buffer.
        store: Where tensors are kept from step to step.
        memory: The memory chosen.
        route: The route chosen, one of the method's.
        rank: This worker.
        world_size: Number of workers.
        seed: Where all randomness starts, the same on every rank.
    """

    block: Block
    numel: int
    store: Store
    memory: Memory
    route: str
    rank: int
    world_size: int
    seed: int

    def feedback(self) -> Feedback:
        """This worker's memory of the block."""
        return self.memory.feedback(self.store, "residual", self.block.slots, self.numel)

    def key(self, step: int) -> int:
        """Randomness of this rank in a step."""
        return key_of(self.seed, step, self.rank)

    def owner_key(self, step: int) -> int:
        """Randomness of this rank in a step, as an owner of a shard."""
        return key_of(self.seed, step, self.world_size + self.rank)

    def shared_key(self, step: int) -> int:
        """Randomness that all ranks share in a step."""
        return key_of(self.seed, step, SHARED)


class Method(ABC):
    """A compressed average. Subclasses are frozen dataclasses whose fields are the paper's hyper-parameters.

    Attributes:
        citation: Authors, year, arXiv id.
        routes: The routes it can take, its usual one first.
        granularities: The scopes of segments it can have, its usual one first.
        memory: Its usual memory.
        takes_all: Whether small and 1-D tensors are its business, too.
    """

    citation: ClassVar[str]
    routes: ClassVar[tuple[str, ...]]
    granularities: ClassVar[tuple[str, ...]] = ("layer", "bucket", "model", "block")
    memory: ClassVar[str] = "none"
    takes_all: ClassVar[bool] = False

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape gains anything; others are averaged densely."""
        return True

    @abstractmethod
    def begin(self, site: Site) -> Any:
        """Sets up whatever :meth:`synchronize` needs at a site; called anew whenever parameters are bucketed anew."""

    @abstractmethod
    def synchronize(self, gradient: Tensor, state: Any, step: int) -> Synchronization:
        """Averages one block over all workers.

        Args:
            gradient: ``float32`` flat buffer; left with the average in the block's elements.
            state: What :meth:`begin` returned.
            step: Counts synchronisations, from 0, the same on every rank.
        """


@dataclass(frozen=True, eq=False)
class _CodecState:
    site: Site
    feedback: Feedback
    shards: Shards | None = None
    owner_feedback: Feedback | None = None


class LinearMethod(Method):
    """A method that is a linear codec: its codes all-reduce."""

    routes = ("allreduce",)

    @abstractmethod
    def codec(self) -> LinearCodec:
        """What writes a gradient."""

    def begin(self, site: Site) -> _CodecState:
        """Sets up the memory."""
        return _CodecState(site, site.feedback())

    def synchronize(self, gradient: Tensor, state: _CodecState, step: int) -> Synchronization:
        """Takes the all-reduce route."""
        return allreduce(self.codec(), state.site.block, gradient, state.feedback, state.site.shared_key(step))


class CodecMethod(Method):
    """A method that is a codec: its payloads are gathered, or sharded among owners who compress again."""

    routes = ("gather", "sharded")

    @abstractmethod
    def codec(self) -> Codec:
        """What writes a gradient."""

    def begin(self, site: Site) -> _CodecState:
        """Sets up the memories; on the sharded route an owner has one like the workers'."""
        if site.route == "gather":
            return _CodecState(site, site.feedback())
        shards = Shards.of(site.block, site.rank, site.world_size)
        owner_feedback = site.memory.feedback(site.store, "owner_residual", shards.own.slots, shards.own.positions)
        return _CodecState(site, site.feedback(), shards, owner_feedback)

    def synchronize(self, gradient: Tensor, state: _CodecState, step: int) -> Synchronization:
        """Takes the chosen route."""
        site, codec = state.site, self.codec()
        if state.shards is None or state.owner_feedback is None:
            return gather(codec, site.block, gradient, state.feedback, site.key(step), site.world_size)
        return sharded(
            codec,
            codec,
            state.shards,
            gradient,
            state.feedback,
            state.owner_feedback,
            site.key(step),
            site.owner_key(step),
        )


class LayerState(MutableMapping[str, Tensor]):
    """What a method remembers of one parameter: tensors by name, kept from step to step and saved with the handle.

    Attributes:
        parameter: The parameter's name.
        step: Counts synchronisations, from 0, the same on every rank.
        rank: This worker.
        world_size: Number of workers.
    """

    def __init__(self, site: Site, slot: Slot) -> None:
        self._store = site.store
        self._fields: dict[str, None] = {}
        self.parameter = slot.name
        self.step = 0
        self.rank = site.rank
        self.world_size = site.world_size
        self._seed = site.seed ^ slot.stream

    def __getitem__(self, name: str) -> Tensor:
        if (kept := self._store.get(name, self.parameter)) is None:
            raise KeyError(name)
        return kept

    def __setitem__(self, name: str, value: Tensor) -> None:
        self._fields[name] = None
        self._store.put(name, self.parameter, value)

    def __delitem__(self, name: str) -> None:
        raise TypeError("what a method remembers is replaced, never deleted")

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def generator(self, shared: bool = True) -> torch.Generator:
        """A CPU generator of this step's randomness, the same on all ranks or this rank's own."""
        key = key_of(self._seed, self.step, SHARED if shared else self.rank)
        return torch.Generator().manual_seed(key)


class LayerMethod(Method):
    """A method written for one parameter's gradient at a time: the shortest way from a paper to the wire.

    Requests of all layers are fused, so each round is still one collective.
    """

    routes = ("allreduce",)
    granularities = ("layer",)

    @abstractmethod
    def average(self, gradient: Tensor, state: LayerState) -> Generator[Request, Tensor, Tensor]:
        """Yields requests, receives their answers, and returns the average.

        Args:
            gradient: ``float32`` with the parameter's shape; not to be changed.
            state: What is remembered of this parameter.
        """

    def begin(self, site: Site) -> list[tuple[Slot, LayerState]]:
        """One state a parameter."""
        return [(slot, LayerState(site, slot)) for slot in site.block.slots]

    def synchronize(self, gradient: Tensor, state: list[tuple[Slot, LayerState]], step: int) -> Synchronization:
        """Runs all layers side by side."""
        return lockstep([self._layer(gradient, slot, remembered, step) for slot, remembered in state])

    def _layer(self, gradient: Tensor, slot: Slot, state: LayerState, step: int) -> Synchronization:
        state.step = step
        view = gradient[slot.offset : slot.stop].view(slot.shape)
        view.copy_((yield from self.average(view, state)))
