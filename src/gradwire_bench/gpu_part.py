"""A part of ``gradwire bench gpu``, in a process of its own.

Every subject is told of when it begins and when it ends, so that whoever listens knows which one a crash belongs to. A
process whose device is lost ends; another begins behind the subject that did it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache, partial
from importlib.util import find_spec
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda import nccl

from gradwire import kernels, own
from gradwire.deferred import Later
from gradwire.layout import Block, Granularity, flat_slots
from gradwire_bench import gpu_memory, gpu_methods, gpu_operations, gpu_ranks, gpu_steps, placement, shapes
from gradwire_bench.gpu_operations import FAMILIES, TARGETS, TIMED, Operation, one_segment
from gradwire_bench.gpu_steps import SMALL, TASKS, Subject
from gradwire_bench.gpu_timing import seconds
from gradwire_bench.worker import emit, reason

CEILING = 125_000_000
"""Values that are copied to know what a copy reaches."""

LEAST_BOUND = 25_000_000
"""Values from which on a kernel is held to its share of a copy: of fewer the launches take most of the time."""

BITS_NUMEL = 400_000
LOST = 3
"""Exit status of a process whose device answers nothing any more."""


def subjects(name: str, device: torch.device) -> Iterator[Subject]:
    """What a part measures; on the CPU everything small, to show that it runs."""
    kind, _, what = name.partition(":")
    small = device.type == "cpu"
    match kind:
        case "kernels":
            return speeds(int(what), 5000 if small else int(what), device)
        case "bits":
            return bits(3000 if small else BITS_NUMEL, device)
        case "step":
            return gpu_steps.overheads(SMALL if small else TASKS[what], device)
        case "waits":
            return gpu_steps.waits(SMALL, device)
        case "overlap":
            return gpu_steps.overlaps(SMALL if small else TASKS[what], device)
        case "methods":
            return gpu_methods.averages(device)
        case "memory":
            return gpu_memory.kept(1024 if small else 4096, device)
        case _:
            return gpu_ranks.ranks(device)


def speeds(stated: int, numel: int, device: torch.device) -> Iterator[Subject]:
    """Every operation's time and share of a copy's bandwidth.

    Args:
        stated: Values that targets go by.
        numel: Values of the gradient.
        device: What computes.
    """
    block, values = one_segment(numel), torch.randn(numel, device=device)

    @cache
    def ceiling() -> float:
        source = torch.ones(CEILING if device.type == "cuda" else numel, device=device)
        target = torch.empty_like(source)
        return 8 * source.numel() / seconds(lambda: target.copy_(source), device)

    def timed(operation: Operation) -> dict[str, Any]:
        later = Later()
        with later.collecting():
            took = seconds(operation.run, device)
        later.settle()
        share = operation.bytes_per_value * numel / took / ceiling()
        target = TARGETS.get(operation.group) if stated >= LEAST_BOUND else None
        return {
            "group": operation.group,
            "microseconds": 1e6 * took,
            "bytes_per_value": operation.bytes_per_value,
            "of_copy": share,
            "copy_gbps": 1e-9 * ceiling(),
            "target": target,
            "reached": None if target is None or device.type == "cpu" else share >= target,
        }

    chosen = [FAMILIES[name] for name in FAMILIES if name in TIMED or name not in gpu_operations.CODES]
    for operation in chain.from_iterable(family(block, values) for family in (*chosen, gpu_operations.others)):
        yield operation.name, partial(timed, operation)


def bits(numel: int, device: torch.device) -> Iterator[Subject]:
    """Every operation of a family on the device and on the CPU, on blocks of any kind with values of any kind."""
    blocks, kinds = _blocks(numel), _values(numel)

    def compared(name: str) -> dict[str, Any]:
        wrong = []
        for shape, block in blocks.items():
            for kind, values in kinds.items():
                pairs = [FAMILIES[name](block, values.to(where)) for where in (device, torch.device("cpu"))]
                for own_one, specified in zip(*pairs, strict=True):
                    if own_one.exact or kind == "normal":
                        wrong += [] if _agree(own_one, specified) else [f"{own_one.name}, {shape}, {kind}"]
        return {"reached": not wrong, "found": "; ".join(wrong)}

    for name in FAMILIES:
        yield name, partial(compared, name)


def _agree(own_one: Operation, specified: Operation) -> bool:
    """Whether both write the same bits, but for which NaN it is; or are as close as float32 is."""
    for operation in (own_one, specified):
        operation.run()
    for found, known in zip((each.cpu() for each in own_one.results), specified.results, strict=True):
        if not own_one.exact:
            same = torch.allclose(found, known, rtol=1e-4, atol=1e-3, equal_nan=True)
        elif found.is_floating_point():
            nan, kind = known.isnan(), torch.int16 if found.element_size() == 2 else torch.int32
            same = torch.equal(found.isnan(), nan) and torch.equal(
                found.masked_fill(nan, 0).view(kind), known.masked_fill(nan, 0).view(kind)
            )
        else:
            same = torch.equal(found, known)
        if not same:
            return False
    return True


def _blocks(numel: int) -> dict[str, Block]:
    """As parameters lie in a bucket, with odd lengths among them."""
    lengths = [shape for _, shape in shapes.get("resnet50")] + [(4129,), (1,), (33,)]
    slots = [slot for slot in flat_slots([(str(i), shape) for i, shape in enumerate(lengths)]) if slot.stop <= numel]
    slots = slots or list(flat_slots([("first", (numel // 2 + 1,)), ("second", (1,)), ("third", (70,))]))
    layers = Block.cut(slots, Granularity("layer"))
    return {"layers": layers, "bucket": Block.cut(slots, Granularity("bucket")), "a shard": layers.shards(3)[1]}


def _values(numel: int) -> dict[str, Tensor]:
    normal = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    spoilt = normal.clone()
    spoilt[::99_991] = torch.nan
    return {
        "normal": normal,
        "denormal": normal * 1e-40,
        "huge": normal.sign() * 3e38,
        "zeros": normal.round() * 0.0,
        "not finite": spoilt,
    }


def facts(device: torch.device) -> dict[str, Any]:
    """The device, what drives it, and what runs by the reference on it."""
    about: dict[str, Any] = {"triton": __import__("triton").__version__ if find_spec("triton") else "not installed"}
    if device.type == "cpu":
        return {"gpu": "none, a rehearsal", **about}
    properties = torch.cuda.get_device_properties(device)
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(asked, capture_output=True, text=True).stdout.strip() if shutil.which(asked[0]) else ""
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "gpu_memory_gib": round(properties.total_memory / 2**30),
        "driver": driver,
        "cuda": torch.version.cuda or torch.version.hip,
        "nccl": ".".join(map(str, nccl.version())) if dist.is_nccl_available() else "",  # type: ignore[no-untyped-call]
        "by_reference": list(kernels.by_reference(device)),
        **about,
    }


def main(name: str, kind: placement.Device, skipped: list[str], share: tuple[int, int]) -> int:
    """Measures what is not skipped, of a share."""
    device = placement.place(kind)
    own.load()
    emit("machine", facts=facts(device))
    first, of = share
    for subject, find in islice(subjects(name, device), first, None, of):
        if subject in skipped:
            continue
        emit("begun", subject=subject)
        begun, result, error = time.monotonic(), {}, None
        try:
            result = find()
        except Exception as caught:  # whatever it is, the other subjects are still worth knowing
            error = reason(caught)
        emit("done", subject=subject, result=result, seconds=time.monotonic() - begun, error=error)
        if error and _is_lost(device):
            return LOST
    return 0


def _is_lost(device: torch.device) -> bool:
    try:
        placement.wait(device)
    except RuntimeError:
        return True
    return False


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    sys.exit(main(job["part"], job["device"], job["skipped"], job["share"]))
