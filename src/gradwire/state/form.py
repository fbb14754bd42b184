"""What a handle's saved state is: its form, and what it must have in common with who loads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, overload

import torch
from torch import Tensor

from gradwire.errors import ConfigurationError
from gradwire.memory import Kind

VERSION = 5
"""Raised whenever the form changes."""

_FORM: dict[str, type] = {
    "configuration": Mapping,
    "parameters": Mapping,
    "rank": int,
    "world_size": int,
    "ranks": Sequence,
    "step": int,
    "dense_steps": int,
    "paused": bool,
    "buckets": Sequence,
    "kinds": Mapping,
    "tensors": Mapping,
}
"""Every key of a state but its version:

* ``configuration``: all choices, text by name.
* ``parameters``: ``{"shape": list, "dtype": str}`` by parameter name; with ``"part": str`` where the rank holds
  a part of it, whose shape that is.
* ``rank`` and ``world_size``: whose state it is.
* ``ranks``: of all workers, in the default group; none where :func:`redistribute` made the state, which is for any
  group of as many.
* ``step``: averages made so far; ``dense_steps`` of them densely, before the method began or while it was paused.
* ``paused``: whether it is.
* ``buckets``: lists of parameter names, as DDP brought the gradients of the last step together.
* ``kinds``: the :class:`~gradwire.memory.Kind` of every field, as text.
* ``tensors``: what is remembered, by field and parameter name, on the CPU.
"""


class Ranks(Sequence[int]):
    """The workers' ranks in the default group: as ``torch.save`` writes it, a ``torch.Size``.

    ``torch.distributed.checkpoint`` takes equal keys on several ranks for copies of one value and keeps one of them. It
    cannot be told from a state's other callers, but it asks whatever has a method of this name how to save it.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)

    def __create_write_items__(self, name: str, value: object) -> NoReturn:
        raise ConfigurationError(
            f"{name.rpartition('.')[0]!r} is a state of which every rank has its own, and torch.distributed.checkpoint "
            "keeps that of one rank; save gradwire.PerRank(handle) in its place"
        )

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return self._ranks[index]

    def __len__(self) -> int:
        return len(self._ranks)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._ranks == tuple(other)

    def __hash__(self) -> int:
        return hash(self._ranks)

    def __repr__(self) -> str:
        return repr(self._ranks)

    def __deepcopy__(self, memo: object) -> Ranks:
        return self

    def __reduce__(self) -> tuple[type[torch.Size], tuple[list[int]]]:
        return torch.Size, (list(self._ranks),)


def check_form(state: Any) -> None:
    """Raises ConfigurationError unless ``state`` has the form of ``Handle.state_dict()``, whoever's it is."""
    if not isinstance(state, Mapping):
        raise ConfigurationError(f"the state is a {type(state).__name__}; give the mapping that state_dict() returned")
    if state.get("version") != VERSION:
        raise ConfigurationError(
            f"state version {state.get('version')!r} is not known; this gradwire reads {VERSION}; "
            "save the state again with this version"
        )
    for key, kind in _FORM.items():
        if key not in state:
            raise ConfigurationError(f"the state has no {key!r}; give all that state_dict() returned")
        if not isinstance(state[key], kind) or (isinstance(state[key], (bool, str)) and kind is not bool):
            raise ConfigurationError(
                f"the state's {key!r} is {_short(state[key])}, but state_dict() gives {kind.__name__} there"
            )
    if not (0 <= state["dense_steps"] <= state["step"] and 0 <= state["rank"] < state["world_size"]):
        raise ConfigurationError(
            f"the state has step {state['step']} with {state['dense_steps']} dense ones, rank {state['rank']} and "
            f"world size {state['world_size']}; a step is 0 or more, a rank is below its world size"
        )
    if not all(isinstance(rank, int) for rank in state["ranks"]):
        raise ConfigurationError(f"the state's ranks are {_short(state['ranks'])}, not whole numbers")
    for name, each in state["parameters"].items():
        if not (isinstance(each, Mapping) and each.keys() - {"part"} == {"shape", "dtype"}):
            raise ConfigurationError(
                f"the state describes parameter {name!r} by {_short(each)}, not by shape and dtype"
            )
    for field, tensors in state["tensors"].items():
        if state["kinds"].get(field) not in list(Kind):
            raise ConfigurationError(
                f"the state keeps {field} as of kind {state['kinds'].get(field)!r}; kinds are {', '.join(Kind)}"
            )
        if not isinstance(tensors, Mapping):
            raise ConfigurationError(f"the state's {field} is {_short(tensors)}, not tensors by parameter name")
        for name, value in tensors.items():
            if name not in state["parameters"]:
                raise ConfigurationError(f"the state keeps {field} of {name!r}, which this model does not have")
            if not isinstance(value, Tensor):
                raise ConfigurationError(f"the state's {field} of {name!r} is {_short(value)}, not a tensor")
    for bucket in state["buckets"]:
        if not (isinstance(bucket, Sequence) and all(isinstance(name, str) for name in bucket)):
            raise ConfigurationError(f"the state has {_short(bucket)} among its buckets, not a list of parameter names")
    named = [name for bucket in state["buckets"] for name in bucket]
    if named and sorted(named) != sorted(state["parameters"]):
        raise ConfigurationError("the state's buckets do not hold each of its parameters once; save the state again")


def emptied(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of the same worker, model and choices when nothing has been averaged yet."""
    return {**state, "step": 0, "dense_steps": 0, "buckets": [], "kinds": {}, "tensors": {}}


def check_same(state: Mapping[str, Any], other: Mapping[str, Any], whose: str) -> None:
    """Raises ConfigurationError, naming the first difference, unless both have one configuration and model.

    Args:
        state: A state of the right form.
        other: Another one, or as much of one.
        whose: What the other belongs to, for the message.
    """
    theirs, ours = state["configuration"], other["configuration"]
    for key in [*ours, *(key for key in theirs if key not in ours)]:
        if ours.get(key) != theirs.get(key):
            raise ConfigurationError(
                f"the state was saved with {key}={theirs.get(key)!r}, {whose} has {key}={ours.get(key)!r}; "
                "attach with the same, or change to it before loading"
            )
    theirs, ours = state["parameters"], other["parameters"]
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        if ours.get(name) != theirs.get(name):
            raise ConfigurationError(
                f"the state was saved with parameter {name!r} {_parameter(theirs.get(name))}, {whose} has it "
                f"{_parameter(ours.get(name))}; load a state saved from the same model, cut in the same way"
                f"{'' if name in ours and name in theirs else ', with the same parameters frozen'}"
            )


def _parameter(each: Mapping[str, Any] | None) -> str:
    if each is None:
        return "not at all"
    part = f", which is part {each['part']}" if "part" in each else ""
    return f"with shape {tuple(each['shape'])} and dtype {each['dtype']}{part}"


def _short(value: Any) -> str:
    text = repr(value)
    return f"the {type(value).__name__} {text}" if len(text) <= 40 else f"a {type(value).__name__}"
