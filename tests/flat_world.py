"""All attachments over one flat buffer, in a world in one process and on a network."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import gradwire
from catalogue import Case, cases
from gradwire.engine.configuration import Configuration
from gradwire.layout import flat_slots
from gradwire.local.world import LocalWorld
from models import SHAPES, gradient, parameters

SLOTS = flat_slots(list(SHAPES.items())[::-1])
"""Last ones first, as Synchronizer has them."""

PLACES = {slot.name: slice(slot.offset, slot.stop) for slot in SLOTS}

FIRSTS = list({(case.method, case.route): case for case in reversed(cases())}.values())
"""Each method's first attachment on each of its routes."""

ROUNDING = {"fp16": 2**-10, "bf16": 2**-7}
"""Of a collective that adds in half precision, which rounds each sum, and no worker can see it."""


def configured(case: Case, **more: Any) -> Configuration:
    return Configuration.make(case.method, case.options, *case.choices, **more)


def world_of(case: Case, workers: int, **more: Any) -> LocalWorld:
    return LocalWorld(configured(case, **more), SLOTS, workers)


@cache
def drawn(rank: int, step: int) -> Tensor:
    return torch.cat([gradient(name, rank, step).flatten() for name in PLACES])


def gradients_of(workers: int, step: int) -> list[Tensor]:
    """Of all workers, each in one flat buffer."""
    return [drawn(rank, step).clone() for rank in range(workers)]


def averaged(world: LocalWorld, gradients: list[Tensor]) -> Tensor:
    """What every rank has, which is the same bits."""
    world.average(gradients)
    first, *others = [each.view(torch.int32) for each in gradients]
    assert all(torch.equal(first, other) for other in others), str(world.engines[0].configuration)
    return gradients[0]


def on_a_network(chosen: list[Case], more: dict[str, Any]) -> list[list[Tensor]]:
    """Averages of three steps of each attachment."""
    found: list[list[Tensor]] = []
    for case in chosen:
        named = parameters()
        # Buckets have the last parameters first, as the world here has; a whole model has them as they are given.
        given = named[::-1] if case.granularity == "model" else named
        sync = gradwire.Synchronizer(given, case.method, **case.arguments, **more)
        found.append([])
        for step in range(3):
            for name, parameter in named:
                parameter.grad = gradient(name, dist.get_rank(), step)
            sync.synchronize()
            found[-1].append(torch.cat([each.grad.flatten() for _, each in named[::-1] if each.grad is not None]))
        sync.close()
    return found
