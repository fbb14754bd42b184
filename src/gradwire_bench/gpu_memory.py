"""What methods keep on a GPU from step to step, and what a step takes beside."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from gradwire.engine.configuration import Configuration
from gradwire.layout import flat_slots
from gradwire.local.world import LocalWorld
from gradwire.memory import Residual
from gradwire_bench.gpu_steps import Subject

WORKERS = 8
TOLERANCE = 0.1
"""Bytes a parameter for tables, and what the allocator rounds up."""

KEPT: dict[str, tuple[str, dict[str, Any], dict[str, Any], float]] = {
    "qsgd": ("qsgd", {"bits": 4}, {}, 0.1),
    "natural": ("natural", {}, {}, 0.1),
    "acpsgd": ("acpsgd", {"rank": 4}, {}, 4.0),
    "efsignsgd, gather": ("efsignsgd", {}, {"route": "gather"}, 4.0),
    "efsignsgd, gather, bfloat16": (
        "efsignsgd",
        {},
        {"route": "gather", "memory": Residual(dtype="bfloat16")},
        6.0,
    ),
    "efsignsgd, sharded": ("efsignsgd", {}, {"route": "sharded"}, 4.0 + 4.0 / WORKERS),
    "topk, sharded": ("topk", {"ratio": 0.01}, {"route": "sharded"}, 4.0 + 4.0 / WORKERS),
    "subspace, sharded": ("subspace", {"bits": 0.8}, {"route": "sharded"}, 8.0 + 4.0 / WORKERS),
    "topk, dgc": ("topk", {"ratio": 0.01}, {"route": "gather", "memory": "dgc"}, 8.0),
    "topk, ef21": ("topk", {"ratio": 0.01}, {"route": "gather", "memory": "ef21"}, 8.0),
}
"""A method, its options, choices, and the bytes a parameter that docs/gpus.md says it keeps; all are of one bucket."""


def kept(side: int, device: torch.device) -> Iterator[Subject]:
    """Of several workers in one process, a share of the allocator's growth each; on the CPU what their stores hold."""
    slots = flat_slots([("matrix", (side, side))])

    def measured(method: str, options: dict[str, Any], choices: dict[str, Any], stated: float) -> dict[str, Any]:
        gradients = [torch.randn(side * side, device=device) for _ in range(WORKERS)]
        values, before = WORKERS * side * side, _allocated(device)
        world = LocalWorld(Configuration.make(method, options, **choices), slots, WORKERS, device)
        for _ in range(3):
            world.average(gradients)
        gc.collect()
        stored = sum(
            sum(each.nbytes for each in (*store.buffers(), *store.singles().values())) + store.scratch_nbytes
            for store in (engine.store for engine in world.engines)
        )
        found = (_allocated(device) - before if device.type == "cuda" else stored) / values
        peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0
        return {
            "bytes_per_parameter": found,
            "stored_per_parameter": stored / values,
            "peak_per_parameter": peak / values,
            "target": stated,
            "reached": abs(found - stated) <= TOLERANCE,
        }

    for name, (method, options, choices, stated) in KEPT.items():
        yield name, partial(measured, method, options, choices, stated)


def _allocated(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)
