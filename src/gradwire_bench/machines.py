"""A step between two machines of two ranks each: hybrid sharding or DDP, dense or compressed, in one level or two.

``python -m gradwire_bench.machines --link 100mbit ddp floor acpsgd:rank=4`` makes the machines in the lab, whose ranks
share a link. With hybrid sharding parameters are cut over the ranks of a machine, and replicas lie on both; with
``--way ddp`` all four ranks are replicas. Every contender averages the same gradients of ResNet-50's shapes in turn; a
step counts as long as its slowest rank took, from the start of backward to its end.

With ``--way shards ddp qsgd:bits=8`` parameters are cut over all four ranks, and what is raced is the reduce-scatter.
There parameters stay gathered from forward to backward, so that a step has no other traffic.

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
from gradwire.lab import Lab, interface_counters
from gradwire_bench import shapes as shape_sets
from gradwire_bench.contenders import DDP, FLOOR, Contender
from gradwire_bench.shapes import NamedShape
from gradwire_bench.worker import agree, process_group

RANKS_OF_A_MACHINE = 2
GROUP_ELEMENTS = 2_000_000
"""Of a parameter group, about: ResNet-50 has a dozen."""

WARM_UP_STEPS = 2
TIMEOUT = 300.0

_CHALLENGERS = {
    "hsdp": (FLOOR, "acpsgd:rank=4"),
    "ddp": (FLOOR, "acpsgd:rank=4", "acpsgd:rank=4,inside=2"),
    "shards": ("qsgd:bits=8",),
}
"""What races torch's own average if nothing is given."""


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
        ratio: How many times fewer bytes than a dense average it sent between machines; 1 for torch's own.
        sent: Bytes that the first machine's interface sent in a step.
    """

    method: str
    seconds: float
    ratio: float
    sent: float

    def __str__(self) -> str:
        names = {DDP: "torch's own average", FLOOR: "no average over replicas"}
        fewer = (
            "" if self.method in names else f", {self.ratio:.1f} times fewer bytes between machines by its own count"
        )
        interface = f"{self.sent / 1e6:.2f} MB through the first machine's interface"
        return f"{names.get(self.method, self.method)}: {self.seconds:.3f} s a step, {interface}{fewer}"


def race(shapes: Sequence[NamedShape], methods: Sequence[str], steps: int, way: str = "hsdp") -> Iterator[Row]:
    """Every contender in turn, on every rank: ``"ddp"`` is torch's own average, ``"floor"`` averages over no replicas.

    Args:
        shapes: Of the gradients.
        methods: Contenders as on the command line.
        steps: Timed steps of each.
        way: ``"hsdp"``, ``"ddp"``, or ``"shards"`` for the reduce-scatter over all ranks.
    """
    number = dist.get_rank()
    for method in methods:
        model = nn.Sequential(*(Part(each, 100 * number + index) for index, each in enumerate(parts(shapes))))
        averaged, handle = _replicated(model, method) if way == "ddp" else _sharded(model, method, way == "shards")
        seconds, before = [], interface_counters()
        for step in range(WARM_UP_STEPS + steps):
            averaged.zero_grad()
            loss = averaged(torch.zeros((), requires_grad=True))
            dist.barrier()
            if step == WARM_UP_STEPS:
                before = interface_counters()
            start = time.perf_counter()
            loss.backward()
            slowest, _ = agree(time.perf_counter() - start)
            seconds += [slowest] if step >= WARM_UP_STEPS else []
        sent = (interface_counters() - before).tx_bytes / steps
        yield Row(method, statistics.median(seconds), 1.0 if handle is None else handle.stats().ratio, sent)
        if handle is not None:
            handle.close()


def _sharded(model: nn.Module, method: str, wholly: bool) -> tuple[nn.Module, gradwire.Handle | None]:
    """Cut over the ranks of a machine, or wholly: over all, and then the reduce-scatter is what a method compresses."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    of_machine = dist.get_world_size() if wholly else RANKS_OF_A_MACHINE
    machines = dist.get_world_size() // of_machine
    mesh = init_device_mesh("cpu", (machines, of_machine), mesh_dim_names=("replicate", "shard"))
    for part in (*model.children(), model):
        fully_shard(part, mesh=mesh["shard"] if wholly or method == FLOOR else mesh, reshard_after_forward=not wholly)
    if method in (DDP, FLOOR):
        return model, None
    contender = Contender.parse(method)
    options: dict[str, Any] = dict(contender.options)
    attach = gradwire.compress_reduce_scatter if wholly else gradwire.compress
    return model, attach(model, contender.name, **options)


def _replicated(model: nn.Module, method: str) -> tuple[nn.Module, gradwire.Handle | None]:
    assert dist.group.WORLD is not None
    wrapped = Contender.parse(method).wrap(model, dist.group.WORLD, init_sync=False)
    return wrapped.model, wrapped.handle


def rank(methods: list[str], steps: int, way: str) -> None:
    """One rank of a race, the first of which tells how it went."""
    with process_group(TIMEOUT) as (number, _):
        for row in race(shape_sets.get("resnet50"), methods, steps, way):
            if number == 0:
                print(row, flush=True)


def machine(arguments: list[str]) -> int:
    """One machine of the lab: starts its ranks, which tell those of other machines by their numbers."""
    first = int(os.environ["RANK"]) * RANKS_OF_A_MACHINE
    size = int(os.environ["WORLD_SIZE"]) * RANKS_OF_A_MACHINE
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "gradwire_bench.machines", "--as", "rank", *arguments],
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
    parser.add_argument("--way", choices=("hsdp", "ddp", "shards"), default="hsdp", help="what is averaged over")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each")
    parser.add_argument("--as", dest="part", choices=("machine", "rank"), help=argparse.SUPPRESS)
    choices = parser.parse_args()
    choices.methods = choices.methods or [DDP, *_CHALLENGERS[choices.way]]
    if choices.way == "shards" and FLOOR in choices.methods:
        parser.error(f"{FLOOR} sends nothing between replicas, and with --way shards there are none; leave it out")
    again = ["--link", choices.link, "--way", choices.way, "--steps", str(choices.steps), *choices.methods]
    if choices.part == "rank":
        rank(choices.methods, choices.steps, choices.way)
    elif choices.part == "machine":
        return machine(again)
    else:
        with Lab(2, choices.link) as lab:
            lab.run(
                [sys.executable, "-m", "gradwire_bench.machines", "--as", "machine", *again],
                on_line=lambda _, line: print(line, flush=True),
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
