"""Where in memory a gradient lies changes no bit of its average: buckets and frameworks lay them out as they like."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from catalogue import OPTIONS
from gradwire import methods
from gradwire.engine.configuration import Configuration
from gradwire.layout import flat_slots
from gradwire.local.world import LocalWorld

SLOTS = flat_slots([("conv", (64, 8, 3, 3)), ("matrix", (40, 40)), ("bias", (40,))])
STEPS = 4


def averages(name: str, first: int) -> Tensor:
    """Of two workers over some steps, whose buffers begin ``first`` elements after an address that is aligned."""
    world = LocalWorld(Configuration.make(name, OPTIONS.get(name, [{}])[0]), SLOTS, 2)
    found, numel = [], SLOTS[-1].stop
    for step in range(STEPS):
        buffers = [torch.zeros(numel + first)[first:] for _ in range(2)]
        for rank, buffer in enumerate(buffers):
            buffer.copy_(torch.randn(numel, generator=torch.Generator().manual_seed(2 * step + rank)))
        world.average(buffers)
        found.append(buffers[0].clone())
    return torch.stack(found)


@pytest.mark.parametrize("name", methods.names())
def test_the_same_bits_wherever_a_buffer_begins(name: str) -> None:
    assert torch.equal(averages(name, 0), averages(name, 1))
