"""What becomes of what is remembered when the choices change while training goes on.

A memory goes on wherever it is the same kind of memory, whatever the method, its options and the memory's weights are
now: what was not sent waits for the new operator. Where it cannot, the step that comes next takes what is owed, the
owners' share too, along with its gradient, so that nothing of it is lost. What a method keeps beside its memory,
factors for example, goes on in the same method.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from types import EllipsisType

import torch
from torch import Tensor

from gradwire.engine.configuration import Configuration
from gradwire.engine.guards.learning_rate import RATE
from gradwire.engine.guards.spikes import SEEN, USUAL
from gradwire.engine.mixture import Settled
from gradwire.engine.nodes import Nodes
from gradwire.layout import Block, Slot
from gradwire.memory import OWED, Kind, NoMemory, Store

_MEMORY = ("residual", "owner_residual")
"""What the store's fields of memories begin with."""

LASTING = (OWED, RATE, USUAL, SEEN)
"""The store's fields of what goes on whatever averages."""


def carry_over(
    store: Store,
    slots: Collection[Slot],
    former: Settled,
    following: Settled | None,
    rank: int,
    world_size: int,
    nodes: Nodes | None,
) -> None:
    """Leaves in a store what goes on, and what is owed otherwise.

    Args:
        store: What was remembered.
        slots: The parameters that it is remembered of, wherever they lie; of others nothing goes on.
        former: The choices until now.
        following: The choices from now on; None if they begin with nothing.
        rank: This worker.
        world_size: Number of workers.
        nodes: The nodes that workers average in first, if they do.
    """
    shapes = {slot.name: slot.shape for slot in slots}
    for slot in slots:
        before = former.rule(slot.name)
        if following is None or not _same_memory(before, following.rule(slot.name), slot.shape, nodes):
            owed = owed_of(store, slot, before, rank, world_size, nodes)
            if owed is not None:
                store.put(OWED, slot.name, owed, Kind.MEAN)

    def goes_on(field: str, name: str) -> bool:
        if name not in shapes or following is None:
            return name in shapes and field in LASTING
        before, after, shape = former.rule(name), following.rule(name), shapes[name]
        if field.partition(".")[0] in _MEMORY:
            return _same_memory(before, after, shape, nodes)
        alike = before.in_parts(shape, nodes) == after.in_parts(shape, nodes)
        return field in LASTING or (alike and after.method.goes_on_from(before.method))

    store.retain(goes_on)


def _same_memory(former: Configuration, following: Configuration, shape: tuple[int, ...], nodes: Nodes | None) -> bool:
    """Whether what was not sent of a tensor of this shape waits where it is for the operator that follows."""
    if former.form(shape, nodes) != following.form(shape, nodes):
        return False
    owing = former.method.owed if former.compresses(shape) else ()
    return not owing or (following.compresses(shape) and following.method.goes_on_from(former.method))


def forgotten(former: Settled, following: Settled, slots: Iterable[Slot], nodes: Nodes | None) -> list[str]:
    """Says which memories are lost: those that keep something else than what is owed, where they cannot go on."""
    found: dict[str, None] = {}
    for slot in slots:
        before, after = former.rule(slot.name), following.rule(slot.name)
        kept = before.memory_of(slot.shape)
        more = len(kept.within) > 1 or not (kept.owed("residual") or isinstance(kept, NoMemory))
        if more and before.form(slot.shape, nodes) != after.form(slot.shape, nodes):
            now = after.memory_of(slot.shape)
            found[f"what memory={kept} kept is forgotten, and memory={now} begins with nothing"] = None
    return list(found)


def lasting(
    store: Store, slots: Iterable[Slot], rules: Settled, rank: int, world_size: int, nodes: Nodes | None
) -> Iterator[tuple[str, str, Tensor, Kind]]:
    """What goes on whatever averages, by field and parameter: what is owed, and what was told of gradients so far."""
    kinds = {OWED: str(Kind.MEAN), **store.kinds()}
    for slot in slots:
        kept = {field: store.get(field, slot.name) for field in LASTING}
        kept[OWED] = owed_of(store, slot, rules.rule(slot.name), rank, world_size, nodes)
        for field, value in kept.items():
            if value is not None:
                yield field, slot.name, value, Kind(kinds[field])


def owed_of(
    store: Store, slot: Slot, rule: Configuration, rank: int, world_size: int, nodes: Nodes | None
) -> Tensor | None:
    """What a memory owes of a parameter, in units of this worker's gradient; None if it is of another kind.

    Where the workers of a node share the parameter, each owes for all of them, of its own rows.
    """
    memory = rule.memory_of(slot.shape)
    if memory.parts:  # differences, of which nothing is owed
        return None
    whole = torch.zeros(slot.shape, dtype=torch.float32, device=store.device)
    own, workers = _own(slot, rule, rank, nodes)
    rows = whole[own]
    if nodes is not None and workers > 1:
        rank, world_size = nodes.node(rank), nodes.count
    owed = rows.view(-1)
    for each in [store.get(field, slot.name) for field in _owing(rule, slot.shape)]:
        if each is not None and each.numel() == owed.numel():
            owed += each.reshape(-1)
    kept = [store.get(field, slot.name) for field in memory.owner().owed("owner_residual")]
    for each in kept:
        if each is None:
            continue
        if rule.route != "sharded":  # all ranks own everything alike
            owed += each.reshape(-1)
            continue
        shard = Block.cut([Slot(slot.name, tuple(rows.shape), 0)], rule.granularity).shards(world_size)[rank]
        for start, length, position in shard.runs.tolist():
            owed[start : start + length] += world_size * each[position : position + length]
    owed *= workers
    owing = store.get(OWED, slot.name)
    return whole if owing is None else whole.add_(owing)


def _owing(rule: Configuration, shape: tuple[int, ...]) -> tuple[str, ...]:
    """The store's fields of what a worker owes of a tensor of this shape: its memory's, and its method's own."""
    return (*rule.memory_of(shape).owed("residual"), *(rule.method.owed if rule.compresses(shape) else ()))


def give_back(
    store: Store,
    slot: Slot,
    rule: Configuration,
    average: Tensor,
    taken: Tensor | None,
    rank: int,
    nodes: Nodes | None,
) -> None:
    """Owes again what made an average of zeros: to what owes that average, to other memories what was taken along."""
    memory = rule.memory_of(slot.shape)
    own, _ = _own(slot, rule, rank, nodes)
    sent = average.view(slot.shape)[own].nan_to_num(0.0, 0.0, 0.0)
    kept = next((each for field in _owing(rule, slot.shape) if (each := store.get(field, slot.name)) is not None), None)
    if kept is not None and kept.numel() == sent.numel():
        kept.add_(sent.view_as(kept), alpha=memory.keeps)
    elif taken is not None and (memory.parts or isinstance(memory, NoMemory)):  # momentum has it in what comes next
        store.put(OWED, slot.name, taken, Kind.MEAN)


def estimate_of(store: Store, slot: Slot, rule: Configuration, rank: int, nodes: Nodes | None) -> Tensor | None:
    """What all workers know of a parameter's mean gradient, in units of this worker's; None if they keep nothing such.

    Where the workers of a node share the parameter, each has it of its own rows, for all of them.
    """
    fields = rule.memory_of(slot.shape).estimates("residual")
    if fields is None:
        return None
    whole = torch.zeros(slot.shape, dtype=torch.float32, device=store.device)
    own, workers = _own(slot, rule, rank, nodes)
    if (shared := store.get(fields[1], slot.name)) is not None:
        whole[own] = workers * shared
    return whole


def begun_at(
    estimate: Tensor, slot: Slot, rule: Configuration, rank: int, nodes: Nodes | None
) -> dict[str, tuple[Tensor, Kind]]:
    """What every worker keeps whose estimate is what all know, by the store's field; owners then owe nothing.

    So all know the same, and it is the mean of the workers' estimates, whoever and however many they are.
    """
    fields = rule.memory_of(slot.shape).estimates("residual")
    if fields is None:
        return {}
    rows = estimate[_own(slot, rule, rank, nodes)[0]]
    return {fields[0]: (rows.neg(), Kind.MEAN), fields[1]: (rows, Kind.SHARED)}


def _own(slot: Slot, rule: Configuration, rank: int, nodes: Nodes | None) -> tuple[slice | EllipsisType, int]:
    """The rows of a parameter that a worker remembers, and how many workers share all of them."""
    if nodes is None or not rule.in_parts(slot.shape, nodes):
        return ..., 1
    return slice(*nodes.rows(slot.shape[0], nodes.place(rank))), nodes.workers


def take_owed(store: Store, slots: Iterable[Slot], gradient: Tensor) -> dict[str, Tensor]:
    """Adds what is owed of some parameters to a flat gradient, and keeps it no more; gives it by name.

    Where a parameter's gradient is not finite nothing is added, for no memory would take it in.
    """
    taken = {}
    for slot in slots:
        if (owed := store.get(OWED, slot.name)) is not None:
            part = gradient[slot.offset : slot.stop]
            part += owed.reshape(-1).where(part.isfinite().all(), 0.0)
            store.drop(OWED, slot.name)
            taken[slot.name] = owed
    return taken


def left_over(rule: Configuration, shape: tuple[int, ...], gradient: Tensor, owed: Tensor) -> Tensor:
    """What is owed still if an average that took it along is not finite, so that nobody takes that.

    All of it where nothing is remembered, or where it was not added to this worker's ``gradient``; else a memory has
    it, and it is zeros.
    """
    remembered = not isinstance(rule.memory_of(shape), NoMemory) or bool(_owing(rule, shape))
    return owed.where(~gradient.isfinite().all(), 0.0) if remembered else owed
