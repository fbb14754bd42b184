"""Methods that are written for one parameter at a time."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Generator, Iterator, MutableMapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import ConfigurationError
from gradwire.layout import Slot
from gradwire.memory import OWED
from gradwire.methods.method import Context, Method
from gradwire.randomness import SHARED, key_of
from gradwire.wire.requests import Request, Synchronization, lockstep


class LayerState(MutableMapping[str, Tensor]):
    """What a method remembers of one parameter: tensors by name, kept from step to step and saved with the handle.

    When the number of workers changes each has the mean of what all had, which leaves alone what is the same on all.

    Attributes:
        parameter: The parameter's name.
        step: Counts synchronisations, from 0, the same on every rank.
        rank: This worker.
        world_size: Number of workers.
    """

    def __init__(self, context: Context, slot: Slot) -> None:
        self._store = context.store
        self.parameter = slot.name
        self.step = 0
        self.rank = context.rank
        self.world_size = context.world_size
        self._seed = context.seed ^ slot.stream

    def __getitem__(self, name: str) -> Tensor:
        if (kept := self._store.get(name, self.parameter)) is None:
            raise KeyError(name)
        return kept

    def __setitem__(self, name: str, value: Tensor) -> None:
        if not isinstance(value, Tensor):
            raise ConfigurationError(
                f"state[{name!r}] = {value!r} is no tensor; what is remembered is kept and saved as tensors: give "
                f"torch.tensor({value!r}), or use state.step, which counts steps"
            )
        if name == OWED:
            raise ConfigurationError(
                f"state[{name!r}] is what the next step adds to the gradient, whatever the method; take another name: "
                "what the method itself owes is state['residual']"
            )
        self._store.put(name, self.parameter, value)

    def __delitem__(self, name: str) -> None:
        raise TypeError("what a method remembers is replaced, never deleted")

    def __iter__(self) -> Iterator[str]:
        return iter(self._store.fields(self.parameter))

    def __len__(self) -> int:
        return len(self._store.fields(self.parameter))

    def generator(self, shared: bool = True) -> torch.Generator:
        """A CPU generator of this step's randomness, the same on all ranks or this rank's own."""
        key = key_of(self._seed, self.step, SHARED if shared else self.rank)
        return torch.Generator().manual_seed(key)


class LayerMethod(Method):
    """A method written for one parameter's gradient at a time: the shortest way from a paper to the wire.

    Requests of all layers are fused, so each round is still one collective. A step whose average is not finite is taken
    back unless ``rollback=False``, so that nothing of it is remembered. What it keeps as ``state["residual"]``, of as
    many elements as the gradient, is what it owes: another method that takes its place begins with that.
    """

    routes = ("allreduce",)
    granularities = ("layer",)
    why_granularity = "it is written for one parameter at a time"
    memories = ("none",)
    rolls_back = True
    owed = ("residual",)

    @abstractmethod
    def average(self, gradient: Tensor, state: LayerState) -> Generator[Request | list[Request], Any, Tensor]:
        """Yields a request, or a list of them for one round, receives the answer, or theirs, and returns the average.

        What it sends stays as it was, and may be the gradient or what is remembered; so may what it keeps.

        Args:
            gradient: ``float32`` with the parameter's shape; not to be changed.
            state: What is remembered of this parameter.
        """

    def init(self, context: Context) -> list[tuple[Slot, LayerState]]:
        """One state a parameter."""
        return [(slot, LayerState(context, slot)) for slot in context.block.slots]

    def synchronize(self, gradient: Tensor, state: list[tuple[Slot, LayerState]], step: int) -> Synchronization:
        """Runs all layers side by side."""
        return lockstep([self._layer(gradient, slot, remembered, step) for slot, remembered in state])

    def _layer(self, gradient: Tensor, slot: Slot, state: LayerState, step: int) -> Synchronization:
        state.step = step
        view = gradient[slot.offset : slot.stop].view(slot.shape)
        rounds: Any = self.average(view, state)
        if not inspect.isgenerator(rounds):
            raise self._wrong(slot, f"is no generator but {type(rounds).__name__}; yield what is to be sent")
        try:
            request = next(rounds)
            while True:
                answer = yield _apart(request)
                request = rounds.send(_readable(answer))
        except StopIteration as end:
            average = end.value
        if not isinstance(average, Tensor) or average.shape != view.shape:
            shape = tuple(average.shape) if isinstance(average, Tensor) else type(average).__name__
            raise self._wrong(slot, f"returned {shape}; return the average, a tensor of the gradient's shape")
        for name, kept in state.items():
            if _shared(kept, view):
                state[name] = kept.clone()
        view.copy_(average)

    def _wrong(self, slot: Slot, said: str) -> ConfigurationError:
        return ConfigurationError(f"{type(self).__name__}.average of {slot.name!r}, {slot.shape}, {said}")


def _apart(request: Any) -> Any:
    """A request whose payload, which the wire may write to, is a copy: so whoever sends it still has what it sent."""
    if isinstance(request, list):
        return [_apart(each) for each in request]
    return replace(request, payload=request.payload.clone()) if isinstance(request, Request) else request


def _readable(answer: Any) -> Any:
    """An answer whose bytes can be read as any other dtype: a copy, since those of others may lie before them."""
    if isinstance(answer, list):
        return [_readable(each) for each in answer]
    return answer.clone(memory_format=torch.contiguous_format) if answer.dtype == torch.uint8 else answer


def _shared(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors lie in one storage."""
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() != 0
