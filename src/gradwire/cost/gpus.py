"""Costs on GPUs, computed from what kernels read and write, at the shares of a copy's speed that an H200 reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gradwire.cost.costs import Costs, Profile, Stage, key_of
from gradwire.engine.configuration import Configuration

GPUS: Mapping[str, float] = {"h200": 4.3e12, "a100": 1.7e12}
"""Bytes a second that a copy reads and writes: measured on an H200, 85 % of an A100's 2.0 TB/s."""

LAUNCH = 12e-6
"""Seconds of a kernel's launch from Python, pytorch-labs/tritonbench#1002."""

LAUNCHES = 5
"""Kernels a bucket and stage."""


@dataclass(frozen=True)
class Traffic:
    """What a method's kernels move.

    Attributes:
        encode: Bytes that encoding reads and writes for a value.
        decode: Bytes that the average takes for a value, whatever the number of workers.
        row: Bytes that each worker's payload adds for a value.
        share: Of a copy's speed that they reach: on an H200 with 25 M values, 2026-11-26 (docs/benchmarks.md).
    """

    encode: float
    decode: float
    row: float = 0.0
    share: float = 0.75


TRAFFIC: Mapping[str, Traffic] = {
    "dense": Traffic(0.0, 0.0),
    "bf16": Traffic(6.0, 6.0, share=0.85),
    "fp16": Traffic(6.0, 6.0, share=0.85),
    "efsignsgd": Traffic(20.1, 4.0, 1 / 8),
    "onebit": Traffic(20.1, 4.0, 1 / 8),
    "signsgd": Traffic(4.1, 4.0, 1 / 8),
    "qsgd": Traffic(4.5, 4.0, 1 / 2, 0.6),
    "loco": Traffic(12.5, 4.0, 1 / 2),
    "qgz": Traffic(4.5, 4.0, 1 / 2, 0.6),
    "terngrad": Traffic(8.2, 4.0, 1 / 4, 0.5),
    "natural": Traffic(9.0, 4.0, 1.0, 0.75),
    "eightbit": Traffic(9.0, 4.0, 1.0, 0.7),
    "topk": Traffic(28.0, 4.0, 0.08, 0.45),
    "dgc": Traffic(36.0, 4.0, 0.01, 0.45),
    "randomk": Traffic(12.0, 4.0, share=0.6),
    "powersgd": Traffic(14.0, 28.0, share=0.5),
    "acpsgd": Traffic(16.0, 12.0, share=0.5),
}
"""Bytes for a value; the residual, read and written, is 8 of them where there is one."""


def computed(gpu: str) -> Profile:
    """The profile of a GPU of :data:`GPUS`."""
    copy = GPUS[gpu]
    methods = {}
    for name, traffic in TRAFFIC.items():
        usual = Configuration.make(name, {})
        for route in usual.method.routes:
            made = Configuration.make(name, {}, route=route)
            methods[key_of(made)] = _costs(traffic, route, copy)
    about = f"bytes that kernels move, at a share of the {copy / 1e12:g} TB/s of a copy, and their launches"
    return Profile(gpu, "computed", about, 8 / copy, methods)


def _costs(traffic: Traffic, route: str, copy: float) -> Costs:
    speed, unit = copy * traffic.share, LAUNCH * LAUNCHES if traffic.encode else 0.0
    encode = Stage(unit=unit, value=traffic.encode / speed)
    if route == "sharded":
        # An owner reads a row of its share from each, which is a row of everything, and encodes the share again.
        owner = Stage(unit=unit, value=traffic.row / speed)
        return Costs((encode, owner, Stage(unit=unit, value=(traffic.decode + traffic.row) / speed)))
    if traffic.row:
        return Costs((encode, Stage(unit=unit, value=traffic.decode / speed, row=traffic.row / speed)))
    return Costs((encode, Stage(unit=unit, value=traffic.decode / speed)))
