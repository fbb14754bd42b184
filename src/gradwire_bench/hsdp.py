"""A step of hybrid sharding between two machines, FSDP2's own average over replicas against compressed ones.

``python -m gradwire_bench.hsdp --link 100mbit ddp floor acpsgd:rank=4`` makes two machines in the lab, with two
ranks on each: parameters are cut over the ranks of a machine, and replicas lie on both. Every contender averages the
same gradients of ResNet-50's shapes in turn; a step counts as long as its slowest rank took, from the start of backward
to its end.

With ``--shards ddp qsgd:bits=8`` parameters are cut over all four ranks, and what is raced is the reduce-scatter. There
parameters stay gathered from forward to backward, so that a step has no other traffic.

Each takes two to three minutes at 100 Mbit/s; the figures are for docs/fsdp.md, under "Speed".
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire
from gradwire.lab import Lab
from gradwire_bench import shapes as shape_sets
from gradwire_bench.contenders import DDP, FLOOR, Contender
from gradwire_bench.shapes import NamedShape
from gradwire_bench.worker import agree, process_group

RANKS_OF_A_MACHINE = 2
GROUP_ELEMENTS = 2_000_000
"""Of a parameter group, about: ResNet-50 has a dozen."""

WARM_UP_STEPS = 2
TIMEOUT = 300.0


class Part(nn.Module):
    """Parameters of given shapes, whose gradients are noise."""

    def __init__(self, shapes: Sequence[NamedShape], seed: int) -> None:
        super().__init__()
        noise = torch.Generator().manual_seed(seed)
        for name, shape in shapes:
            self.register_parameter(name.replace(".", "_"), nn.Parameter(torch.zeros(shape)))
        self._noise = [torch.randn(shape, generator=noise) for _, shape in shapes]

    def forward(self, inputs: Tensor) -> Tensor:
        """The sum of all parameters, weighed by the noise, added to the input."""
        return inputs + sum((each * noise).sum() for each, noise in zip(self.parameters(), self._noise, strict=True))


def parts(shapes: Sequence[NamedShape]) -> list[list[NamedShape]]:
    """Consecutive shapes, about as much in each list."""
    found: list[list[NamedShape]] = [[]]
    filled = 0
    for name, shape in shapes:
        if filled >= GROUP_ELEMENTS:
            found.append([])
            filled = 0
        found[-1].append((name, shape))
        filled += math.prod(shape)
    return found


@dataclass(frozen=True)
class Row:
    """What a contender took.

    Attributes:
        method: The contender.
        seconds: The median step, its slowest rank's time.
        ratio: How many times fewer bytes than a dense average it sent between machines; 1 for FSDP's own.
    """

    method: str
    seconds: float
    ratio: float

    def __str__(self) -> str:
        names = {DDP: "FSDP2's own average", FLOOR: "no average over replicas"}
        sent = "" if self.method in names else f", {self.ratio:.1f} times fewer bytes between machines"
        return f"{names.get(self.method, self.method)}: {self.seconds:.3f} s a step{sent}"


def race(shapes: Sequence[NamedShape], methods: Sequence[str], steps: int, shards: bool = False) -> Iterator[Row]:
    """Every contender in turn, on every rank: ``"ddp"`` is FSDP2's own average, ``"floor"`` averages over no replicas.

    Args:
        shapes: Of the gradients.
        methods: Contenders as on the command line.
        steps: Timed steps of each.
        shards: Whether parameters are cut over all ranks, and the reduce-scatter is compressed.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    number, machines = dist.get_rank(), dist.get_world_size() // RANKS_OF_A_MACHINE
    if shards:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    else:
        mesh = init_device_mesh("cpu", (machines, RANKS_OF_A_MACHINE), mesh_dim_names=("replicate", "shard"))
    attach = gradwire.compress_reduce_scatter if shards else gradwire.compress
    for method in methods:
        model = nn.Sequential(*(Part(each, 100 * number + index) for index, each in enumerate(parts(shapes))))
        for part in (*model, model):
            fully_shard(part, mesh=mesh["shard"] if method == FLOOR else mesh, reshard_after_forward=not shards)
        contender, handle = Contender.parse(method), None
        if method not in (DDP, FLOOR):
            options: dict[str, Any] = dict(contender.options)
            handle = attach(model, contender.name, **options)
        seconds = []
        for step in range(WARM_UP_STEPS + steps):
            model.zero_grad()
            loss = model(torch.zeros((), requires_grad=True))
            dist.barrier()
            start = time.perf_counter()
            loss.backward()
            slowest, _ = agree(time.perf_counter() - start)
            seconds += [slowest] if step >= WARM_UP_STEPS else []
        yield Row(method, statistics.median(seconds), 1.0 if handle is None else handle.stats().ratio)
        if handle is not None:
            handle.close()


def rank(methods: list[str], steps: int, shards: bool) -> None:
    """One rank of a race, the first of which tells how it went."""
    with process_group(TIMEOUT) as (number, _):
        for row in race(shape_sets.get("resnet50"), methods, steps, shards):
            if number == 0:
                print(row, flush=True)


def machine(arguments: list[str]) -> int:
    """One machine of the lab: starts its ranks, which tell those of other machines by their numbers."""
    first = int(os.environ["RANK"]) * RANKS_OF_A_MACHINE
    size = int(os.environ["WORLD_SIZE"]) * RANKS_OF_A_MACHINE
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "gradwire_bench.hsdp", "--as", "rank", *arguments],
            env={**os.environ, "RANK": str(first + each), "WORLD_SIZE": str(size)},
        )
        for each in range(RANKS_OF_A_MACHINE)
    ]
    return max(abs(each.wait()) for each in ranks)


def main() -> int:
    """Makes the machines and prints a line for every contender."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", help="name:option=value,...; by default some")
    parser.add_argument("--link", default="100mbit", help="rate between the machines")
    parser.add_argument("--shards", action="store_true", help="race the reduce-scatter over all ranks")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each")
    parser.add_argument("--as", dest="part", choices=("machine", "rank"), help=argparse.SUPPRESS)
    choices = parser.parse_args()
    choices.methods = choices.methods or ([DDP, "qsgd:bits=8"] if choices.shards else [DDP, FLOOR, "acpsgd:rank=4"])
    if choices.shards and FLOOR in choices.methods:
        parser.error(f"{FLOOR} sends nothing between replicas, and with --shards there are none; leave it out")
    again = ["--link", choices.link, "--steps", str(choices.steps), *["--shards"] * choices.shards, *choices.methods]
    if choices.part == "rank":
        rank(choices.methods, choices.steps, choices.shards)
    elif choices.part == "machine":
        return machine(again)
    else:
        with Lab(2, choices.link) as lab:
            lab.run(
                [sys.executable, "-m", "gradwire_bench.hsdp", "--as", "machine", *again],
                on_line=lambda _, line: print(line, flush=True),
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
