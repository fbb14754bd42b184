"""Local steps that are the same numbers in every framework, and where torch's own way in takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from arrays import ALL, gradients

import gradwire
from gradwire.layout import as_matrix

Arrays = list[np.ndarray[Any, Any]]


def start() -> Arrays:
    """The same on all ranks."""
    return gradients(0, 77)


def nesterov(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    """DiLoCo's outer optimizer."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


PLANS: list[dict[str, Any]] = [
    {"every": 3},
    {"every": 3, "outer": nesterov, "verify_every": 1},
    {"every": 4, "method": "qsgd", "bits": 4, "warmup_steps": 2},
    {"every": 4, "method": "topk", "ratio": 0.05, "fragments": 2, "delay": 1, "mix": 0.5, "outer": nesterov},
    {"every": 4, "method": "acpsgd", "rank": 2, "fragments": 2, "cut": "layers"},
    {"every": 2, "method": "efsignsgd", "granularity": "model"},
]


def by_torch(names: list[str], worker: int, steps: int, order: Sequence[int] = ALL, **plan: Any) -> tuple[Any, Any]:
    """What :func:`gradwire.periodic` makes of steps along each rank's gradients: after each step, and its counters."""
    first = [start()[place] for place in order]
    parameters = [torch.nn.Parameter(torch.from_numpy(each.copy()).view(as_matrix(each.shape))) for each in first]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    handle = gradwire.periodic(optimizer, parameters=zip(names, parameters, strict=True), **plan)
    seen = []
    for step in range(steps):
        for parameter, place in zip(parameters, order, strict=True):
            parameter.grad = torch.from_numpy(gradients(worker, step)[place]).view(parameter.shape)
        optimizer.step()
        seen.append([p.detach().numpy().reshape(each.shape).copy() for p, each in zip(parameters, first, strict=True)])
    handle.synchronize()
    seen.append([p.detach().numpy().reshape(each.shape).copy() for p, each in zip(parameters, first, strict=True)])
    counted = (handle.stats().wire_bytes, handle.stats().steps, handle.syncs)
    handle.close()
    return seen, counted
