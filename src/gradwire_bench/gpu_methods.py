"""Averages of every method on a GPU, held to the CPU's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradwire import methods
from gradwire.engine.configuration import Configuration
from gradwire.layout import flat_slots
from gradwire.local.world import LocalWorld
from gradwire.policy import DensePolicy
from gradwire_bench.gpu_steps import Subject

SLOTS = flat_slots([("matrix", (120, 300)), ("convolution", (32, 16, 3, 3)), ("vector", (700,))])
WORKERS = 2
STEPS = 5
TOLERANCE = 1e-3
"""Of the largest value, where sums of products have no order that all devices share, and of singular vectors."""

CLOSE = ("acpsgd", "atomo", "dion", "powersgd")
"""Methods of which each worker's own projections, or singular vectors, are as close as float32 is."""


def averages(device: torch.device) -> Iterator[Subject]:
    """Of each method, by several workers in one process."""

    def compared(name: str) -> dict[str, Any]:
        found, known = (_averages(name, where) for where in (device, torch.device("cpu")))
        same = [
            torch.equal(one.view(torch.int32), other.view(torch.int32)) for one, other in zip(found, known, strict=True)
        ]
        errors = [
            float((one - other).abs().max() / other.abs().max().clamp_min(1e-30))
            for one, other in zip(found, known, strict=True)
        ]
        return {
            "steps_with_the_same_bits": sum(same),
            "error": max(errors),
            "reached": all(same) or (name in CLOSE and max(errors) <= TOLERANCE),
        }

    for name in methods.names():
        yield name, partial(compared, name)


def _averages(name: str, device: torch.device) -> list[Tensor]:
    """What each step gives."""
    everything = DensePolicy(below=0, vectors=False)
    world = LocalWorld(Configuration.make(name, {}, dense=everything), SLOTS, WORKERS, device)
    given = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        gradients = [torch.randn(SLOTS[-1].stop, generator=generator).to(device) for _ in range(WORKERS)]
        world.average(gradients)
        given.append(gradients[0].cpu())
    return given
