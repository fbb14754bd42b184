"""From the states of some workers to those of another number of them."""

from __future__ import annotations

import math
from ast import literal_eval
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import ConfigurationError
from gradwire.granularity import WHOLE_ROWS
from gradwire.layout import Block, Granularity, Slot
from gradwire.memory import Kind
from gradwire.patterns import matches
from gradwire.plain import plain
from gradwire.state.form import check_form, check_same

State = Mapping[str, Any]


def redistribute(states: Sequence[State], workers: int) -> list[dict[str, Any]]:
    """Makes the states of ``workers`` workers from those of all workers of a run, so that nothing owed is lost.

    An average is a mean over workers, so what compression still owes to the model is the mean of the workers'
    residuals and, on the sharded route, what the owners of the elements did not send of averages. Both are conserved:
    the mean up to one rounding of float32, the owners' share exactly. As many workers as before get what they had. What
    is made may be loaded by any process group of ``workers`` ranks, not only by the one that saved.

    What becomes of a field is decided by its :class:`~gradwire.memory.Kind`:

    ========= ============================================================================================
    mean      Every worker gets the workers' mean: residuals, DGC's velocities and what they add up to,
              momenta, DeMo's coefficients, the low-pass filter's memory, accumulated squares, the lags of EF21 and
              DIANA (whose mean stays minus the estimate that all share and what owners owe to it), and
              floating-point tensors that a :class:`~gradwire.methods.LayerMethod` keeps. Tensors of other dtypes go
              by rank modulo workers.
    owned     The owners' residuals on the sharded route: put together and cut for the new owners.
    shared    The same on all, and so it stays: factors of PowerSGD and ACP-SGD, bases of GradiVeQ, the estimates of
              EF21 and DIANA, the low-pass filter's ages, capacities, budgets, and the residual of ``owner=`` on the
              gather route.
    private   By rank modulo workers: SIDCo's stages.
    world     Left out, to be found anew: Ok-Topk's regions, which are even until they are next cut.
    ========= ============================================================================================

    What a state of periodic averaging has besides goes by rank modulo workers, and so let each rank load the model's
    and the optimizer's state: of rank ``rank % n`` of the n that were. In the middle of a period these differ, with
    eager updates also where local steps began, and what local steps of the ranks left out changed since then is lost;
    :meth:`gradwire.Periodic.synchronize` before saving loses nothing.

    In the state of an optimizer of :mod:`gradwire.optim` it is the compression's state that is redistributed. All else
    there must be the same on all ranks, as it always is with 1-bit Adam, and with 0/1 Adam after ``synchronize()``.

    Args:
        states: What ``state_dict()`` returned on each rank after the same step, in any order.
        workers: How many workers there are to be, at least 1.

    Returns:
        A state for each rank, in order; they may share tensors with one another and with ``states``.

    Raises:
        ConfigurationError: If states are missing, malformed, or not of one run and step, or if ``workers`` is below 1.

    Example:
        >>> states = [torch.load(f"rank{rank}.pt", weights_only=True) for rank in range(4)]
        >>> handle.load_state_dict(gradwire.redistribute(states, workers=1)[rank])
    """
    workers = plain(workers)
    if not (isinstance(workers, int) and workers >= 1):
        raise ConfigurationError(f"workers={workers!r} is out of range; choose a whole number >= 1")
    if any(isinstance(state, Mapping) and "param_groups" in state for state in states):
        return _of_optimizers(states, workers)
    ordered = _of_one_run(states)
    if len(ordered) == workers:
        return [{**state, "ranks": ()} for state in ordered]
    first = ordered[0]
    if "inside" in first["configuration"]:
        raise ConfigurationError(
            "the states are of workers that share what they remember inside nodes "
            f"(inside={first['configuration']['inside']}), {len(ordered)} in all, which cannot be made those of "
            f"{workers}; go on with as many nodes of as many workers"
        )
    made: list[dict[str, Any]] = [
        {
            **ordered[rank % len(ordered)],
            **{"rank": rank, "world_size": workers, "ranks": (), "kinds": {}, "tensors": {}},
        }
        for rank in range(workers)
    ]
    kinds = {field: kind for state in ordered for field, kind in state["kinds"].items()}
    for field, kind in kinds.items():  # an owner of nothing has none of what owners keep
        if any(state["kinds"].get(field, kind) != kind for state in ordered):
            raise ConfigurationError(f"the states do not agree whose {field} is; give states of one run")
        kept = [state["tensors"].get(field, {}) for state in ordered]
        match Kind(kind):
            case Kind.MEAN | Kind.GIVEN:
                fields = _means(field, kept, workers)
            case Kind.OWNED:
                fields = _cut_anew(kept, workers, first)
            case Kind.SHARED:
                fields = [_the_same(field, kept)] * workers
            case Kind.PRIVATE:
                fields = [kept[rank % len(kept)] for rank in range(workers)]
            case Kind.WORLD:
                continue
        for state, tensors in zip(made, fields, strict=True):
            state["kinds"][field], state["tensors"][field] = kind, dict(tensors)
    return made


def _of_optimizers(states: Sequence[State], workers: int) -> list[dict[str, Any]]:
    """Optimizers' states, whose compression's are made for other workers, if all else is the same on all ranks."""
    for state in states:
        if not (isinstance(state, Mapping) and isinstance(state.get("gradwire"), Mapping)):
            raise ConfigurationError(
                "not all states are of an optimizer of gradwire.optim, though some are of an optimizer; give what "
                "state_dict() of one returned on each rank"
            )
    made = redistribute([state["gradwire"].get("compression") for state in states], workers)
    ordered = sorted(states, key=lambda state: int(state["gradwire"]["compression"]["rank"]))
    if len(ordered) == workers:
        return [_with_compression(state, each) for state, each in zip(ordered, made, strict=True)]
    first = ordered[0]
    for rank, state in enumerate(ordered):
        apart = _differences(_with_compression(state, None), _with_compression(first, None), "state_dict()")
        place = next(apart, None)
        if place is not None:
            raise ConfigurationError(
                f"{place} of rank {rank} is not that of rank 0, as only compression's may be; call ZeroOneAdam's "
                "synchronize() before states are saved"
            )
    return [_with_compression(first, each) for each in made]


def _with_compression(state: State, compression: State | None) -> dict[str, Any]:
    return {**state, "gradwire": {**state["gradwire"], "compression": compression}}


def _differences(ours: object, theirs: object, place: str) -> Iterator[str]:
    """Where two states of plain containers, values and tensors are not the same."""
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        same = ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    elif isinstance(ours, Mapping) and isinstance(theirs, Mapping) and ours.keys() == theirs.keys():
        same = True
        for key, each in ours.items():
            yield from _differences(each, theirs[key], f"{place}[{key!r}]")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        same = True
        for index, each in enumerate(ours):
            yield from _differences(each, theirs[index], f"{place}[{index}]")
    else:
        same = not isinstance(ours, Tensor | Mapping | list) and type(ours) is type(theirs) and ours == theirs
    if not same:
        yield place


def _of_one_run(states: Sequence[State]) -> list[State]:
    """The states in order of rank, if they are all that a run had after one step."""
    if not states:
        raise ConfigurationError("there are no states; give one of each worker")
    for state in states:
        check_form(state)
    first = states[0]
    for state in states[1:]:
        check_same(state, first, f"that of rank {first['rank']}")
        for key in ("step", "dense_steps", "paused", "world_size", "ranks", "buckets"):
            if state[key] != first[key]:
                raise ConfigurationError(
                    f"the state of rank {state['rank']} has {key}={state[key]!r}, that of rank {first['rank']} has "
                    f"{first[key]!r}; give states that were saved after the same step of one run"
                )
        if _local_steps(state) != _local_steps(first):
            raise ConfigurationError(
                f"the state of rank {state['rank']} has {_local_steps(state)} local steps, that of rank "
                f"{first['rank']} has {_local_steps(first)}; give states that were saved after the same step of one run"
            )
    ranks = sorted(state["rank"] for state in states)
    if ranks != list(range(first["world_size"])):
        raise ConfigurationError(
            f"there are states of ranks {', '.join(map(str, ranks))}; give one of each of the {first['world_size']} "
            "workers"
        )
    return sorted(states, key=lambda state: int(state["rank"]))


def _local_steps(state: State) -> object:
    """How many there were, of a state of periodic averaging."""
    return state["periodic"]["steps_done"] if "periodic" in state else "no"


def _means(field: str, kept: Sequence[Mapping[str, Tensor]], workers: int) -> list[dict[str, Tensor]]:
    """For every worker the mean of all, summed in float64; by rank where values have no mean."""
    fields: list[dict[str, Tensor]] = [{} for _ in range(workers)]
    for name in dict.fromkeys(name for tensors in kept for name in tensors):
        values = [tensors[name] for tensors in kept if name in tensors]
        value = values[0]
        if len(values) < len(kept) or any((each.shape, each.dtype) != (value.shape, value.dtype) for each in values):
            raise ConfigurationError(
                f"not all workers keep {field} of {name!r} with shape {tuple(value.shape)} and dtype {value.dtype}, so "
                "it has no mean; give states of one run"
            )
        if value.is_floating_point():
            total = torch.zeros(value.shape, dtype=torch.float64)
            for each in values:
                total += each
            values = [(total / len(values)).to(value.dtype)]
        for rank, tensors in enumerate(fields):
            tensors[name] = values[rank % len(values)]
    return fields


def _the_same(field: str, kept: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """What all workers have that have any."""
    shared: dict[str, Tensor] = {}
    for tensors in kept:
        for name, value in tensors.items():
            if not torch.equal(shared.setdefault(name, value), value):
                raise ConfigurationError(
                    f"{field} of {name!r} is not the same on all workers, as it must be; their averages had come apart "
                    "before these states were saved"
                )
    return shared


def _cut_anew(kept: Sequence[Mapping[str, Tensor]], workers: int, state: State) -> list[dict[str, Tensor]]:
    """Puts the owners' shares of every parameter together, and cuts them for other owners."""
    fields: list[dict[str, Tensor]] = [{} for _ in range(workers)]
    for name in state["parameters"]:
        if not any(name in tensors for tensors in kept):
            continue
        shape = tuple(state["parameters"][name]["shape"])
        block = Block.cut([Slot(name, shape, 0)], _granularity(name, state["configuration"]))
        dtype = next(tensors[name].dtype for tensors in kept if name in tensors)
        whole = torch.zeros(math.prod(shape), dtype=dtype)
        for shard, tensors in zip(block.shards(len(kept)), kept, strict=True):
            size = int(shard.runs[-1, 1:].sum()) if len(shard.runs) else 0
            share = tensors.get(name, torch.zeros(0, dtype=dtype))
            if share.shape != (size,):
                raise ConfigurationError(
                    f"an owner's share of {name!r} has shape {tuple(share.shape)}, not ({size},); give states of one "
                    "run"
                )
            for start, length, position in shard.runs.tolist():
                whole[start : start + length] = share[position : position + length]
        for shard, fresh in zip(block.shards(workers), fields, strict=True):
            if len(shard.runs):
                fresh[name] = torch.zeros(int(shard.runs[-1, 1:].sum()), dtype=dtype)
            for start, length, position in shard.runs.tolist():
                fresh[name][position : position + length] = whole[start : start + length]
    return fields


def _granularity(name: str, configuration: Mapping[str, str]) -> Granularity:
    """By what a parameter is cut; where there are patterns, by the first that its name matches."""
    patterns = literal_eval(f"[{configuration.get('patterns', '')}]")
    own = next((f"{each!r} " for each in patterns if matches(name, each)), "")
    rows = configuration.get(f"{own}shares") == WHOLE_ROWS
    return replace(Granularity.parse(configuration[f"{own}granularity"]), rows=rows)
