"""Every method of the catalogue, side by side: what it is, what it writes, how fast, and how far off it is."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import gradwire
from gradwire.layout import Slot, flat_slots
from gradwire.methods import Method
from gradwire.train.configuration import Configuration
from gradwire.train.policy import DensePolicy
from gradwire.train.together import Step, Together

WORKERS = 4
"""Payloads that are decoded and averaged."""

WARM_UP_STEPS = 2
"""Steps before the clock runs: pages are touched, thresholds settle."""

TIMED_STEPS = 4

SECONDS = 3.0
"""No step begins later than this after the first to warm up, or the first that is timed."""

COMPILED_SIDE = 128
"""Side of the matrix whose average has a method's kernels compiled."""

APART = 4099
"""Elements between the places in one stretch of noise from which gradients are taken."""

SPARSE: Mapping[str, Mapping[str, Any]] = {
    "threshold": {"threshold": 5.0},
    "strom": {"threshold": 5.0},
    "hybrid": {"threshold": 5.0},
    "variance": {"alpha": 3.8},
}
"""With what options methods are timed that send as many coordinates as the gradient asks for.

Of normal noise they send about 1 % then; with their defaults, which suit real gradients, nearly everything or nothing.
"""

Progress = Callable[[int, int, str], None]
"""Told how many methods are done, how many there are, and which is next."""


@dataclass(frozen=True)
class Entry:
    """What a method says of itself.

    Attributes:
        name: Its name.
        summary: What it does, in a line.
        bias: Exact, unbiased, contractive or biased.
        routes: Its routes, the usual one first.
        granularities: Its granularities, the usual one first.
        memory: Its usual memory.
        options: Its hyper-parameters with the defaults.
        wire_bits: The formula of what a worker writes for a segment.
        citation: Authors, year, arXiv id.
    """

    name: str
    summary: str
    bias: str
    routes: tuple[str, ...]
    granularities: tuple[str, ...]
    memory: str
    options: dict[str, Any]
    wire_bits: str
    citation: str


@dataclass(frozen=True)
class Measurement:
    """What a method was seen to do, with its usual route and memory, in a world of four workers.

    Attributes:
        name: The method.
        bits: Bits a worker writes for an element of the gradient, all rounds together.
        encode_gbps: Gradient bytes a second, in units of 1e9, until the first payload is written.
        decode_gbps: The same from the first answer to the average.
        error: ``|average - mean|^2 / |mean|^2`` of one step on real gradients, without a memory; None if not measured.
    """

    name: str
    bits: float
    encode_gbps: float
    decode_gbps: float
    error: float | None


def entries(names: Sequence[str] = ()) -> list[Entry]:
    """The catalogue, or some of it."""
    found = []
    for name in names or gradwire.methods.names():
        method = gradwire.methods.get(name)
        found.append(
            Entry(
                name=name,
                summary=(method.__doc__ or "").strip().partition("\n")[0].replace("``", ""),
                bias=method.bias,
                routes=method.routes,
                granularities=method.granularities,
                memory=str(method.memory),
                options={field.name: _default(field) for field in dataclasses.fields(method)},  # type: ignore[arg-type]
                wire_bits=method.wire_bits,
                citation=method.citation,
            )
        )
    return found


def measure(
    names: Sequence[str],
    numel: int,
    gradients: Sequence[Mapping[str, Tensor]] = (),
    progress: Progress = lambda done, total, name: None,
) -> list[Measurement]:
    """Runs each method for some steps on one thread: :data:`WARM_UP_STEPS`, then :data:`TIMED_STEPS`.

    Kernels are compiled beforehand. No step begins later than :data:`SECONDS` after the first to warm up or the first
    that is timed; a method too slow to warm up is judged by its last step. Noise is drawn once. Every worker in
    every step takes its gradient from another place in it, so no coordinate sees a number twice.

    Args:
        names: The methods.
        numel: Elements of the square matrix that is timed, rounded up to whole rows.
        gradients: Real gradients by parameter name, one set of each worker, to tell the error on; none if empty.
        progress: Called before each method and after the last.
    """
    side = math.isqrt(numel - 1) + 1
    slots = flat_slots([("weight", (side, side))])
    places = WORKERS * (WARM_UP_STEPS + TIMED_STEPS)
    noise = torch.randn(slots[-1].stop + APART * places, generator=torch.Generator().manual_seed(0))
    real = [_flat(each) for each in gradients]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = []
    try:
        for done, name in enumerate(names):
            progress(done, len(names), name)
            error = _error(gradwire.methods.get(name)(), real) if real else None
            found.append(_timed(name, slots, noise, error))
        progress(len(names), len(names), "")
    finally:
        torch.set_num_threads(threads)
    return found


def _timed(name: str, slots: Sequence[Slot], noise: Tensor, error: float | None) -> Measurement:
    method = gradwire.methods.get(name)(**SPARSE.get(name, {}))
    few = flat_slots([("weight", (COMPILED_SIDE, COMPILED_SIDE))])
    _world(method, few, None).average(list(noise[: WORKERS * few[-1].stop].view(WORKERS, -1).clone()))
    world = _world(method, slots, None)
    numel = slots[-1].stop
    gradients = [torch.empty(numel) for _ in range(WORKERS)]
    begins = itertools.count(0, APART)

    def steps(most: int) -> Iterator[Step]:
        start = time.perf_counter()
        for done in range(most):
            if done and time.perf_counter() - start > SECONDS:
                return
            for gradient in gradients:
                gradient.copy_(noise[(first := next(begins)) : first + numel])
            yield world.average(gradients)

    warm = list(steps(WARM_UP_STEPS))
    timed = list(steps(TIMED_STEPS)) if len(warm) == WARM_UP_STEPS else warm[-1:]
    gigabytes = 4e-9 * numel
    return Measurement(
        name=name,
        bits=8 * statistics.mean(step.written_bytes for step in timed) / numel,
        encode_gbps=gigabytes / statistics.median(step.encode_seconds for step in timed),
        decode_gbps=gigabytes / statistics.median(step.decode_seconds for step in timed),
        error=error,
    )


def _error(method: Method, real: Sequence[tuple[tuple[Slot, ...], Tensor]]) -> float:
    """Of the first step, compressed tensors only."""
    slots = real[0][0]
    flat = [values.clone() for _, values in real]
    mean = torch.stack(flat).double().mean(0)
    _world(method, slots, "none").average(flat)
    return float((flat[0] - mean).square().sum() / mean.square().sum())


def _world(method: Method, slots: Sequence[Slot], memory: str | None) -> Together:
    everything = DensePolicy(below=0, vectors=False)
    if memory not in method.memories:
        memory = None
    return Together(Configuration.make(method, {}, memory=memory, dense=everything), slots, WORKERS)


def _flat(gradients: Mapping[str, Tensor]) -> tuple[tuple[Slot, ...], Tensor]:
    """Matrices and convolutions one after another in a flat buffer; the rest goes dense in training."""
    large = {name: each for name, each in gradients.items() if not DensePolicy().keeps_dense(tuple(each.shape))}
    slots = flat_slots([(name, tuple(each.shape)) for name, each in large.items()])
    return slots, torch.cat([each.flatten() for each in large.values()])


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default is not dataclasses.MISSING else None
