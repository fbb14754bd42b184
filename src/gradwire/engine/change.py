"""What becomes of what is remembered when the choices change while training goes on.

A memory goes on wherever it is the same kind of memory, whatever the method, its options and the memory's weights are
now: what was not sent waits for the new operator. Where it cannot, the step that comes next takes what is owed, the
owners' share too, along with its gradient, so that nothing of it is lost. What a method keeps beside its memory,
factors for example, goes on in the same method.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from gradwire.engine.configuration import Configuration
from gradwire.engine.guards.learning_rate import RATE
from gradwire.engine.mixture import Settled
from gradwire.layout import Block, Slot
from gradwire.memory import OWED, Kind, NoMemory, Store

_MEMORY = ("residual", "owner_residual")
"""What the store's fields of memories begin with."""


def carry_over(
    store: Store,
    slots: Collection[Slot],
    former: Settled,
    following: Settled,
    rank: int,
    world_size: int,
) -> None:
    """Leaves in a store what goes on, and what is owed otherwise.

    Args:
        store: What was remembered.
        slots: The parameters that it is remembered of, wherever they lie; of others nothing goes on.
        former: The choices until now.
        following: The choices from now on.
        rank: This worker.
        world_size: Number of workers.
    """
    shapes = {slot.name: slot.shape for slot in slots}
    for slot in slots:
        before = former.rule(slot.name)
        if before.form(slot.shape) != following.rule(slot.name).form(slot.shape):
            owed = owed_of(store, slot, before, rank, world_size)
            if owed is not None:
                store.put(OWED, slot.name, owed, Kind.MEAN)

    def goes_on(field: str, name: str) -> bool:
        if name not in shapes:
            return False
        before, after = former.rule(name), following.rule(name)
        if field.partition(".")[0] in _MEMORY:
            return before.form(shapes[name]) == after.form(shapes[name])
        return field in (OWED, RATE) or after.method.goes_on_from(before.method)

    store.retain(goes_on)


def forgotten(former: Settled, following: Settled, slots: Iterable[Slot]) -> list[str]:
    """Says which memories are lost: those that keep something else than what is owed, where they cannot go on."""
    found: dict[str, None] = {}
    for slot in slots:
        before, after = former.rule(slot.name), following.rule(slot.name)
        kept = before.memory_of(slot.shape)
        more = len(kept.within) > 1 or not (kept.owed("residual") or isinstance(kept, NoMemory))
        if more and before.form(slot.shape) != after.form(slot.shape):
            now = after.memory_of(slot.shape)
            found[f"what memory={kept} kept is forgotten, and memory={now} begins with nothing"] = None
    return list(found)


def owed_of(store: Store, slot: Slot, rule: Configuration, rank: int, world_size: int) -> Tensor | None:
    """What a memory owes of a parameter, in units of this worker's gradient; None if it is of another kind."""
    memory = rule.memory_of(slot.shape)
    if memory.parts:  # differences, of which nothing is owed
        return None
    owed = torch.zeros(slot.numel, dtype=torch.float32, device=store.device)
    kept = [store.get(field, slot.name) for field in (OWED, *memory.owed("residual"))]
    for each in kept:
        if each is not None:
            owed += each.reshape(-1)
    kept = [store.get(field, slot.name) for field in memory.owner().owed("owner_residual")]
    for each in kept:
        if each is None:
            continue
        if rule.route != "sharded":  # all ranks own everything alike
            owed += each.reshape(-1)
            continue
        shard = Block.cut([Slot(slot.name, slot.shape, 0)], rule.granularity).shards(world_size)[rank]
        for start, length, position in shard.runs.tolist():
            owed[start : start + length] += world_size * each[position : position + length]
    return owed.view(slot.shape)


def take_owed(store: Store, slots: Iterable[Slot], gradient: Tensor) -> None:
    """Adds what is owed of some parameters to a flat gradient, and keeps it no more."""
    for slot in slots:
        if (owed := store.get(OWED, slot.name)) is not None:
            gradient[slot.offset : slot.stop] += owed.reshape(-1)
            store.drop(OWED, slot.name)
