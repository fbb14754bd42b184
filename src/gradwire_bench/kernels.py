"""How long the inner loops take on one thread, as multiples of a copy of the same tensor, and on several."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.quantize import DeadZone
from gradwire.cost.measure import one_thread
from gradwire.kernels import Code, codes
from gradwire.kernels.reference import elias_fano_bytes
from gradwire.layout import Block, Granularity, Slot, flat_slots
from gradwire.memory import NONE, Feedback
from gradwire.randomness import key_of
from gradwire_bench import resident, shapes

ROWS = 4
"""Payloads that are decoded and averaged at once."""

BUCKET = 512
"""Values that share a scale in stochastic payloads."""

DENSITY = 0.01
"""Share of the elements that sparse operations choose."""

Segments = Literal["one", "resnet"]

Progress = Callable[[int, int, str], None]
"""Told how many measurements are done, how many there are, and what is measured next."""


@dataclass(frozen=True)
class Row:
    """One operation.

    Attributes:
        operation: What was measured.
        seconds: Each round's time.
        times_copy: Median of its time divided by that of ``Tensor.copy_`` in the same round.
        target: The largest ``times_copy`` we accept, if we promise any.
        gigabytes_per_second: Bytes of gradient handled a second, in units of 1e9.
        peak_extra_bytes: Growth of resident memory during one call: what it needed beyond its inputs, residual and
            payload. None where the system does not tell.
        times_faster: Median of its time divided by that on several threads in the same round, if there are several.
    """

    operation: str
    seconds: list[float]
    times_copy: float
    target: float | None
    gigabytes_per_second: float
    peak_extra_bytes: int | None
    times_faster: float | None = None

    @property
    def milliseconds(self) -> float:
        """The median of the rounds."""
        return 1e3 * statistics.median(self.seconds)


@dataclass(frozen=True)
class _Operation:
    name: str
    target: float | None
    run: Callable[[], object]


def measure(
    numel: int = 25_000_000,
    repeats: int = 7,
    segments: Segments = "one",
    progress: Progress | None = None,
    threads: int = 1,
) -> list[Row]:
    """Times every operation once a round, so that all of them meet the same disturbances; twice with several threads.

    Args:
        numel: Elements of the gradient, or an upper bound of them with ``"resnet"``.
        repeats: Rounds.
        segments: One segment of all, or the layers of ResNet-50 as far as they fit in ``numel`` elements.
        progress: Called before each measurement and after the last.
        threads: How many to use beside one.
    """
    report = progress or (lambda done, total, name: None)
    block = _block(numel, segments)
    report(0, 1, "compiling")
    with one_thread():
        operations = _operations(block)
        total = len(operations) * (repeats + 1)
        peaks: dict[str, int | None] = {}
        for done, operation in enumerate(operations):
            report(done, total, operation.name)
            operation.run()  # touches what it writes to, so that only scratch is new
            peaks[operation.name] = _peak_extra_bytes(operation.run)
        seconds: dict[str, list[float]] = {operation.name: [] for operation in operations}
        shared: dict[str, list[float]] = {operation.name: [] for operation in operations}
        for repeat in range(1, repeats + 1):
            for done, operation in enumerate(operations, repeat * len(operations)):
                report(done, total, operation.name)
                seconds[operation.name].append(_timed(operation))
                if threads > 1:
                    torch.set_num_threads(threads)
                    shared[operation.name].append(_timed(operation))
                    torch.set_num_threads(1)
        report(total, total, "")
    copies = seconds[operations[0].name]
    return [
        Row(
            operation=operation.name,
            seconds=times,
            times_copy=_median_ratio(times, copies),
            target=operation.target,
            gigabytes_per_second=4e-9 * block.numel / statistics.median(times),
            peak_extra_bytes=peaks[operation.name],
            times_faster=_median_ratio(times, shared[operation.name]) if threads > 1 else None,
        )
        for operation in operations
        for times in [seconds[operation.name]]
    ]


def _timed(operation: _Operation) -> float:
    start = time.perf_counter()
    operation.run()
    return time.perf_counter() - start


def _median_ratio(seconds: list[float], others: list[float]) -> float:
    return statistics.median(own / other for own, other in zip(seconds, others, strict=True))


def _block(numel: int, segments: Segments) -> Block:
    if segments == "one":
        return Block.cut([Slot("weight", (numel,), 0)], Granularity("layer"))
    slots = flat_slots(shapes.get("resnet50"))
    fitting = [slot for slot in slots if slot.stop <= max(numel, slots[0].stop)]
    return Block.cut(fitting, Granularity("layer"))


def _operations(block: Block) -> list[_Operation]:
    """The copy first, then all kernels over tensors that they share."""
    generator = torch.Generator().manual_seed(0)
    size = block.numel
    gradient = torch.randn(size, generator=generator)
    residual, out = torch.zeros(size), torch.empty(size)
    return [
        _Operation("copy", None, lambda: out.copy_(gradient)),
        _Operation("accumulate", None, lambda: kernels.accumulate(block, gradient, residual, 0.9, 1.0)),
        *_quantisers(block, gradient, residual, out),
        *_levels(block, gradient, residual, out),
        *_sparse(block, gradient, residual, out),
    ]


def _quantisers(block: Block, gradient: Tensor, residual: Tensor, out: Tensor) -> list[_Operation]:
    operations, small = [], block.divided(BUCKET)
    measured: list[tuple[str, Code, Block, float, float | None]] = [("sign", codes.Sign(), block, 2.5, 3.0)]
    measured += [(f"stochastic {bits} bits", codes.QSGD(bits), small, 5.0, None) for bits in (2, 4, 8)]
    for name, code, segments, encoded_within, decoded_within in measured:
        payloads = torch.empty(ROWS, kernels.payload_bytes(code, segments), dtype=torch.uint8)
        for rank, payload in enumerate(payloads):
            kernels.encode(code, segments, kernels.Compensated(gradient), payload, key_of(0, 0, rank))

        def encode(payload: Tensor = payloads[0], code: Code = code, segments: Block = segments) -> None:
            kernels.encode(code, segments, kernels.Compensated(gradient, residual, 0.9), payload, key_of(0, 0, 0))

        def decode(payloads: Tensor = payloads, code: Code = code, segments: Block = segments) -> None:
            kernels.decode(code, segments, payloads, out, 1 / ROWS)

        operations.append(_Operation(f"{name}: encode with feedback", encoded_within, encode))
        operations.append(_Operation(f"{name}: average {ROWS}", decoded_within, decode))
    return operations


def _levels(block: Block, gradient: Tensor, residual: Tensor, out: Tensor) -> list[_Operation]:
    operations, whole = [], Block.cut(block.slots, Granularity("model"))
    for bits in (0.1, 0.8):
        codec = DeadZone(bits)
        payloads = torch.empty(ROWS, codec.payload_bytes(whole), dtype=torch.uint8)
        for row, payload in enumerate(payloads):
            codec.encode(whole, gradient.roll(row), NONE, payload, 0)

        def encode(codec: DeadZone = codec, payload: Tensor = payloads[0]) -> None:
            codec.encode(whole, gradient, Feedback(residual, 0.9), payload, 0)

        def decode(codec: DeadZone = codec, payloads: Tensor = payloads) -> None:
            codec.decode(whole, payloads, out, 1 / ROWS)

        operations.append(_Operation(f"levels {bits} bits: encode with feedback", None, encode))
        operations.append(_Operation(f"levels {bits} bits: average {ROWS}", None, decode))
    return operations


def _sparse(block: Block, gradient: Tensor, residual: Tensor, out: Tensor) -> list[_Operation]:
    counts = np.ceil(block.segment_numels * DENSITY).astype(np.int64)
    chosen = int(counts.sum())
    positions = torch.empty(ROWS, chosen, dtype=torch.int64)
    values = torch.empty(ROWS, chosen)
    indices = torch.empty(ROWS, elias_fano_bytes(chosen, block.positions), dtype=torch.uint8)
    for row in range(ROWS):
        shifted = gradient.roll(row)
        kernels.topk_select(block, kernels.Compensated(shifted), counts, positions[row], values[row])
        kernels.elias_fano_encode(positions[row], block.positions, indices[row])
    own_positions, own_values = positions[0].clone(), values[0].clone()
    random_positions, random_values = torch.empty_like(own_positions), torch.empty_like(own_values)

    def select() -> None:
        kernels.topk_select(block, kernels.Compensated(gradient, residual, 0.9), counts, own_positions, own_values)
        kernels.subtract(block, residual, own_positions, own_values)

    def average() -> None:
        for payload, row in zip(indices, positions, strict=True):
            kernels.elias_fano_decode(payload, block.positions, row)
        kernels.scatter_sum(block, positions, values, out, 1 / ROWS)

    def choose() -> None:
        kernels.randomk_positions(block, counts, random_positions, key_of(0, 0))
        kernels.gather(block, gradient, random_positions, random_values)

    share = f"{DENSITY:.0%}"
    return [
        _Operation(f"top-k {share}: select with feedback", 6.0, select),
        _Operation(
            f"top-k {share}: write indices",
            None,
            lambda: kernels.elias_fano_encode(own_positions, block.positions, indices[0]),
        ),
        _Operation(f"top-k {share}: read indices and average {ROWS}", 2.0, average),
        _Operation(f"random-k {share}: choose and gather", None, choose),
    ]


def _peak_extra_bytes(run: Callable[[], object]) -> int | None:
    """How far resident memory rises while ``run`` runs."""
    if not resident.reset_peak():
        return None
    before = resident.peak()
    run()
    return max(0, resident.peak() - before)
