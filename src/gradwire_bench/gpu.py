"""All that a GPU is needed for, in one go: bits, speeds, host waits, and what a step of training takes longer.

``python -m gradwire_bench.gpu [FILE.json]`` does what ``gradwire bench gpu`` does, and needs neither rich nor cyclopts.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda import nccl

from gradwire import kernels
from gradwire.errors import ConfigurationError
from gradwire.kernels import Code, codes
from gradwire.layout import Block, Granularity, flat_slots
from gradwire.randomness import key_of
from gradwire_bench import gpu_steps, shapes
from gradwire_bench.gpu_report import Report, Speed, Verdict, lines
from gradwire_bench.gpu_steps import DENSITY, RANK
from gradwire_bench.gpu_timing import Told, seconds

NUMELS = (1_000_000, 25_000_000, 125_000_000)
ROWS = 8
"""Payloads that are decoded at once."""

BUCKET = 512
CODES: tuple[Code, ...] = (
    codes.Sign(),
    codes.Sign(norm=2),
    codes.Vote(),
    codes.OneBit(),
    codes.QSGD(2),
    codes.QSGD(4, euclidean=True),
    codes.QSGD(8, nearest=True),
    codes.NUQSGD(4),
    codes.NUQSGD(8),
    codes.TernGrad(),
    codes.TernGrad(clip=2.5),
    codes.ThreeLC(1.3),
    codes.Natural(8),
    codes.Natural(9),
    codes.Exponent(),
    codes.Dynamic(),
)
"""Of every class one at least: what the GPU's bits are held to, here and in Triton's interpreter."""

SECONDS = 450.0
"""After so many no further part is begun."""


def measure(
    numels: tuple[int, ...] = NUMELS,
    told: Told = lambda text: None,
    keep: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Takes a few minutes on one GPU; what matters most comes first, and what fails loses nothing but itself.

    Args:
        numels: Values of the gradients.
        told: Told what is done.
        keep: Given what there is after each part.

    Raises:
        ConfigurationError: If torch sees no GPU.
    """
    if not torch.cuda.is_available():
        raise ConfigurationError(
            f"torch {torch.__version__} sees no GPU here; run this where `torch.cuda.is_available()` says True. "
            "Without one, `make test-gpu-kernels` checks the kernels' bits"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    told("copy")
    copy = 8e-9 * numels[-1] / seconds(_copying(numels[-1], device), device)
    report = Report(_machine(device), kernels.by_reference(device), copy, [], [], [], [], [])
    return _collected(report, _parts(report, numels, device, told), keep)


Part = tuple[str, list[Any], Callable[[], Iterable[Any]]]
"""A name, where the findings go, and what finds them."""


def _parts(report: Report, numels: tuple[int, ...], device: torch.device, told: Told) -> Iterator[Part]:
    """The middle size first: of smaller ones the launches take most of the time."""
    first, *others = sorted(numels, key=lambda numel: abs(numel - NUMELS[1]))

    def speeds(numel: int) -> Part:
        return f"kernels at {numel / 1e6:g} M", report.speeds, lambda: _speeds(numel, device, report.copy, told)

    yield speeds(first)
    yield "bits", report.bits, lambda: _bits(device, told)
    yield "waits", report.waits, partial(_within_a_world, partial(_all_waits, device, told))
    for name in gpu_steps.MODELS:
        yield f"steps of {name}", report.steps, partial(_within_a_world, partial(gpu_steps.steps, name, device, told))
    for numel in others:
        yield speeds(numel)


def _collected(report: Report, parts: Iterable[Part], keep: Callable[[Report], None]) -> Report:
    """Each part's findings as far as it came; why it came no further is among the failures."""
    begun = time.monotonic()
    for name, findings, find in parts:
        if time.monotonic() - begun > SECONDS:
            report.failures.append(f"{name}: not begun, {SECONDS:g} s had passed")
            continue
        try:
            for each in find():
                findings.append(each)
        except Exception as error:  # whatever it is, the other parts are still worth knowing
            report.failures.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
        keep(report)
    return report


def _within_a_world(find: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    with gpu_steps.world_of_one():
        yield from find()


def _all_waits(device: torch.device, told: Told) -> Iterator[Verdict]:
    return (gpu_steps.waits(method, options, device, told) for method, options in gpu_steps.METHODS)


def _machine(device: torch.device) -> dict[str, Any]:
    facts = torch.cuda.get_device_properties(device)
    triton = __import__("triton").__version__ if find_spec("triton") else "not installed"
    return {
        "device": facts.name,
        "capability": f"{facts.major}.{facts.minor}",
        "memory_gib": round(facts.total_memory / 2**30),
        "cuda": torch.version.cuda or torch.version.hip,
        "driver": _driver(),
        "nccl": ".".join(map(str, nccl.version())) if dist.is_nccl_available() else "",  # type: ignore[no-untyped-call]
        "torch": torch.__version__,
        "triton": triton,
        "numpy": np.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def _driver() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True).stdout.strip() if shutil.which(asked[0]) else ""


def _copying(numel: int, device: torch.device) -> Callable[[], object]:
    source, target = torch.ones(numel, device=device), torch.empty(numel, device=device)
    return lambda: target.copy_(source)


def _blocks() -> dict[str, Block]:
    fitting = [slot for slot in flat_slots(shapes.get("resnet50")) if slot.stop <= 1_500_000]
    layers = Block.cut(fitting, Granularity("layer"))
    return {
        "layers": layers,
        "bucket": Block.cut(fitting, Granularity("bucket")),
        "of 512": layers.divided(BUCKET),
        "a shard": layers.shards(3)[1],
    }


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


def _bits(device: torch.device, told: Told) -> Iterator[Verdict]:
    """Encodes and decodes on the GPU, and on the CPU."""
    blocks = _blocks()
    values = _values(max(block.slots[-1].stop for block in blocks.values()))
    for code in CODES:
        told(f"bits of {code}")
        wrong = []
        for name, block in blocks.items():
            for kind, whole in values.items():
                gradient = whole[: block.slots[-1].stop]
                outcomes = [_outcome(code, block, gradient, where) for where in (device, torch.device("cpu"))]
                if not all(_same(own.cpu(), specified) for own, specified in zip(*outcomes, strict=True)):
                    wrong.append(f"{name}, {kind}")
        yield Verdict(f"bits of {code}", not wrong, "; ".join(wrong))


def _outcome(code: Code, block: Block, gradient: Tensor, where: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    values, residual = gradient.to(where), torch.ones_like(gradient, device=where)
    payloads = torch.zeros(2, kernels.payload_bytes(code, block), dtype=torch.uint8, device=where)
    kernels.encode(code, block, kernels.Compensated(values, residual, 0.9), payloads[0], key_of(0, 0, 0))
    kernels.encode(code, block, kernels.Compensated(values), payloads[1], key_of(0, 0, 1))
    out = torch.zeros_like(values)
    kernels.decode(code, block, payloads, out, 0.5)
    return payloads, residual, out


def _same(own: Tensor, specified: Tensor) -> bool:
    """Equal bit for bit, but for which NaN it is."""
    if own.is_floating_point():
        nan = own.isnan()
        own, other = (each.masked_fill(nan, 0).view(torch.int32) for each in (own, specified))
        return torch.equal(nan, specified.isnan()) and torch.equal(own, other)
    return torch.equal(own, specified)


def _speeds(numel: int, device: torch.device, copy: float, told: Told) -> Iterator[Speed]:
    block = Block.cut(flat_slots([("weight", (numel,))]), Granularity("layer"))
    gradient, residual, out = (torch.randn(numel, device=device) for _ in range(3))

    def speed(name: str, bytes_per_value: float, target: float | None, run: Callable[[], object]) -> Speed:
        told(f"{name}, {numel / 1e6:g} M")
        took = seconds(run, device)
        return Speed(name, numel, 1e6 * took, bytes_per_value, 1e-9 * numel * bytes_per_value / took / copy, target)

    yield speed("accumulate", 12, 0.85, lambda: kernels.accumulate(block, gradient, residual, 0.9, 1.0))
    kept = out.view(torch.bfloat16)[:numel]
    yield speed("narrow", 6, 0.85, lambda: kernels.narrow(block, gradient, kept, key_of(0, 0)))
    for name, code, own, passes in (
        ("sign", codes.Sign(), block, 2),
        ("two means", codes.OneBit(), block, 2),
        ("4 bits of 512", codes.QSGD(4), block.divided(BUCKET), 1),
        ("2 bits of 512", codes.QSGD(2), block.divided(BUCKET), 1),
        ("8 bits, nearest, of 512", codes.QSGD(8, nearest=True), block.divided(BUCKET), 1),
        ("dynamic", codes.Dynamic(), block, 2),
        ("natural", codes.Natural(8), block, 2),
        ("ternary", codes.TernGrad(), block, 2),
    ):
        size = kernels.payload_bytes(code, own)
        payloads = torch.empty(ROWS, size, dtype=torch.uint8, device=device)
        for payload in payloads:
            kernels.encode(code, own, kernels.Compensated(gradient), payload, key_of(0, 0))
        share = size / numel

        def encode(code: Code = code, own: Block = own, payload: Tensor = payloads[0], keep: bool = True) -> None:
            kernels.encode(
                code, own, kernels.Compensated(gradient, residual if keep else None, 0.9), payload, key_of(0, 0)
            )

        def decode(code: Code = code, own: Block = own, payloads: Tensor = payloads) -> None:
            kernels.decode(code, own, payloads, out, 1 / ROWS)

        yield speed(f"{name}: encode with residual", 8 * passes + 4 + share, 0.75, encode)
        yield speed(f"{name}: encode", 4 * passes + share, 0.75, lambda encode=encode: encode(keep=False))  # type: ignore[misc]
        yield speed(f"{name}: decode {ROWS}", ROWS * share + 4, 0.75, decode)
        del payloads
    counts = np.ceil(block.segment_numels * DENSITY).astype(np.int64)
    positions = torch.empty(int(counts.sum()), dtype=torch.int64, device=device)
    values = torch.empty(len(positions), device=device)
    yield speed(
        "random-k 1 %: choose",
        8 * DENSITY,
        None,
        lambda: kernels.randomk_positions(block, counts, positions, key_of(0, 0)),
    )
    if "topk_select" not in kernels.by_reference(device):
        yield speed(
            "top-k 1 %: select with residual",
            28,
            0.6,
            lambda: kernels.topk_select(block, kernels.Compensated(gradient, residual, 0.9), counts, positions, values),
        )
    side = math.isqrt(numel)
    matrix = Block.cut(flat_slots([("matrix", (side, side))]), Granularity("layer"))
    p, q = (torch.randn(RANK, side, device=device) for _ in range(2))
    yield speed(
        f"rank {RANK}: project with residual",
        16,
        0.5,
        lambda: kernels.project_rows(matrix, kernels.Compensated(gradient, residual, 0.9), q, p, subtract=None),
    )
    yield speed(f"rank {RANK}: write product", 12, 0.5, lambda: kernels.write_product(matrix, p, q, out, residual))
    yield speed("torch.topk 1 %, for comparison", 4, None, lambda: gradient.abs().topk(len(positions)))


def main() -> int:
    """Prints the report, and writes it where told."""
    try:
        report = measure(told=lambda text: print(text, file=sys.stderr, flush=True), keep=_kept)
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(*lines(report), sep="\n")
    return 1 if report.failures else 0


def _kept(report: Report) -> None:
    """Writes what there is, where a file was named."""
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(dataclasses.asdict(report), indent=2, allow_nan=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
