"""What methods take here: seconds between their rounds, on this device, of gradients of given shapes."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, fields, replace
from datetime import date
from itertools import combinations
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gradwire.cost import probe, shapes
from gradwire.cost.costs import FREE, Costs, Profile, Stage, key_of
from gradwire.cost.shapes import NamedShape
from gradwire.engine.configuration import Configuration
from gradwire.layout import Slot, flat_slots
from gradwire.local.world import LocalWorld
from gradwire.methods import Context, Method
from gradwire.wire import AllGather, AllReduceMean, Request, Synchronization, Transport

WORLDS = (2, 5)
"""Numbers of workers with which a method is measured, so that what each payload adds shows."""

WARM_UP_STEPS = 2
TIMED_STEPS = 4

LARGE = tuple((f"matrix{index}", (2048, 2048)) for index in range(4))
"""Few large matrices, beside the many small ones of a network, so that what each parameter adds shows."""

SAMPLE = 1 << 21
"""Values of a model on which methods are measured where it is about to be trained."""

Clock = Callable[[], float]


def clock_of(device: torch.device) -> Clock:
    """What tells how long a method works: the time of its thread, whatever else runs, or that of its device."""
    if device.type == "cpu":
        return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


@dataclass(frozen=True)
class Watched(Method):
    """A method whose work between rounds is timed, on rank 0.

    Attributes:
        method: Which.
        clock: By what.
        times: Where seconds are noted, by stage: before the first round, after that, and so on.
        gathered: Where the stages are noted that begin with what was gathered of all workers.
    """

    method: Method
    clock: Clock = time.thread_time
    times: dict[int, list[float]] = field(default_factory=dict)
    gathered: set[int] = field(default_factory=set)

    @property
    def takes_all(self) -> bool:  # type: ignore[override]
        """As the method."""
        return self.method.takes_all

    def worker_bound(self, numel: int) -> float:
        """As the method's."""
        return self.method.worker_bound(numel)

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """As the method."""
        return self.method.accepts(shape)

    def init(self, context: Context) -> Any:
        """The method's state, and whose it is."""
        return context.rank, self.method.init(context)

    def synchronize(self, gradient: Tensor, state: Any, step: int) -> Synchronization:
        """The method's, timed on rank 0."""
        rank, own = state
        average = self.method.synchronize(gradient, own, step)
        return average if rank else self._timed(average)

    def _timed(self, average: Synchronization) -> Synchronization:
        stage, answer = 0, None
        while True:
            start = self.clock()
            try:
                request = next(average) if answer is None else average.send(answer)
            except StopIteration:
                return
            finally:
                self.times.setdefault(stage, []).append(self.clock() - start)
            self.times[stage][-1] += self._scaling(request)
            answer = yield request
            stage += 1
            if any(isinstance(each, AllGather) for each in _asked(request)):
                self.gathered.add(stage)

    def _scaling(self, request: Request | Sequence[Request]) -> float:
        """What the wire takes to divide by the number of workers before sums."""
        copies = [each.payload.clone() for each in _asked(request) if isinstance(each, AllReduceMean)]
        start = self.clock()
        for each in copies:
            each.mul_(0.5)
        return self.clock() - start


def _asked(request: Request | Sequence[Request]) -> Sequence[Request]:
    """The requests of a round."""
    return [request] if isinstance(request, Request) else request


def stage_seconds(
    configuration: Configuration, parameters: Sequence[NamedShape], workers: int, noise: Tensor
) -> tuple[list[Slot], list[float], set[int]]:
    """Seconds of each stage of a method over one bucket of all parameters, and what of them it compresses.

    The third is which stages begin with what was gathered of all workers.

    A method that does something else in every other step has the mean of both, each the median of its times.
    """
    slots = flat_slots(parameters)
    watched = Watched(configuration.method, clock_of(noise.device))
    world = LocalWorld(replace(configuration, method=watched, start=0), slots, workers, noise.device)
    numel = slots[-1].stop
    gradients = [torch.empty(numel, dtype=torch.float32, device=noise.device) for _ in range(workers)]
    for step in range(WARM_UP_STEPS + TIMED_STEPS):
        for rank, gradient in enumerate(gradients):
            start = (step * workers + rank) * 4096 % (len(noise) - numel + 1)
            gradient.copy_(noise[start : start + numel])
        if step == WARM_UP_STEPS:
            watched.times.clear()
        world.average(gradients)
    taken = [slot for slot in slots if configuration.compresses(slot.shape)]
    alternate = [[times[0::2], times[1::2]] for _, times in sorted(watched.times.items())]
    return taken, [statistics.mean(statistics.median(each) for each in both) for both in alternate], watched.gathered


def costs(configuration: Configuration, noise: Tensor, samples: Sequence[Sequence[NamedShape]]) -> Costs:
    """What a method takes where the noise lies, of some models' parameters, each in two worlds."""
    rows: list[tuple[int, int, int]] = []
    seconds: list[list[float]] = []
    gathered: set[int] = set()
    for parameters in samples:
        for workers in WORLDS:
            taken, stages, read = stage_seconds(configuration, parameters, workers, noise)
            gathered |= read
            rows.append((len(taken), sum(slot.numel for slot in taken), workers))
            seconds.append(stages)
    count = min(map(len, seconds))
    if not count:
        return FREE  # none of the parameters is compressed
    # Rounds beyond those that all worlds have, as where their number grows with workers, count as the last one.
    kept = [[*stages[: count - 1], statistics.mean(stages[count - 1 :])] for stages in seconds]
    fits = [
        _fitted(rows, [stages[index] for stages in kept], _growing(configuration.route, index in gathered))
        for index in range(count)
    ]
    errors = [
        abs(sum(fit.seconds(*row) for fit in fits) - sum(stages)) / sum(stages)
        for row, stages in zip(rows, kept, strict=True)
    ]
    return Costs(tuple(fits), statistics.median(errors))


def _growing(route: str, gathered: bool) -> Literal["segment", "row"] | None:
    """What there is more of with more workers: their payloads, if all of them came to everybody, or cuts."""
    if route == "sharded":
        return "segment"
    return "row" if gathered else None


def _fitted(
    rows: Sequence[tuple[int, int, int]], seconds: Sequence[float], growing: Literal["segment", "row"] | None
) -> Stage:
    """The stage with the least relative error, none of its parts below zero."""
    parts = {"tensor": [each for each, _, _ in rows], "value": [each for _, each, _ in rows]}
    if growing is not None:
        counted = parts["value" if growing == "row" else "tensor"]
        parts[growing] = [each * workers for each, (_, _, workers) in zip(counted, rows, strict=True)]
    names, weighed = [*parts], np.array([*parts.values()], dtype=np.float64).T / np.array(seconds)[:, None]
    best, found = np.inf, Stage()
    for size in range(len(names), 0, -1):
        for chosen in combinations(range(len(names)), size):
            fit, *_ = np.linalg.lstsq(weighed[:, chosen], np.ones(len(weighed)), rcond=None)
            error = float(np.square(weighed[:, chosen] @ fit - 1).sum())
            if (fit >= 0).all() and error < best - 1e-12:
                best = error
                found = Stage(**{names[index]: float(part) for index, part in zip(chosen, fit, strict=True)})
    return found


def sample(parameters: Sequence[NamedShape], most: int = SAMPLE) -> list[NamedShape]:
    """Matrices from all parts of a model, of about so many values together; the largest have fewer rows."""
    matrices = [each for each in parameters if len(each[1]) > 1] or parameters
    every = math.ceil(shapes.numel(matrices) / most) or 1
    picked = matrices[every // 2 :: every] or matrices[:1]
    rows = [max(1, shape[0] * most // math.prod(shape)) if math.prod(shape) > most else 0 for _, shape in picked]
    return [(name, (row, *shape[1:]) if row else shape) for (name, shape), row in zip(picked, rows, strict=True)]


def here(
    configurations: Iterable[Configuration],
    parameters: Sequence[NamedShape],
    device: torch.device,
    most: int = SAMPLE,
) -> Profile:
    """What methods take of a model on the device that it is about to be trained on, by about ``most`` of its values."""
    sampled = sample(parameters, most)
    numel = shapes.numel(sampled)
    noise = torch.randn(numel + (1 << 16), generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(device)
    methods = {key_of(each): costs(each, noise, [sampled]) for each in configurations}
    about = f"{numel:,} values, torch {torch.__version__}, {date.today()}"
    return Profile(str(device), "measured", about, methods=methods)


def slowest(profile: Profile, transport: Transport, device: torch.device) -> tuple[Profile, float]:
    """What all workers measured, as their slowest take it, and how many times as long that is as the quickest take."""
    stages = [stage for costs in profile.methods.values() for stage in costs.stages]
    parts = [part for stage in stages for part in astuple(stage)]
    *most, longest, shortest = probe.largest([*parts, sum(parts), -sum(parts)], transport, device)
    size = len(fields(Stage))
    merged = iter(Stage(*most[start : start + size]) for start in range(0, len(most), size))
    methods = {
        key: Costs(tuple(next(merged) for _ in costs.stages), costs.spread) for key, costs in profile.methods.items()
    }
    return replace(profile, methods=methods), longest / -shortest if shortest else 1.0


def measured(
    configurations: Iterable[Configuration], device: str, report: Callable[[str], object] = lambda name: None
) -> Profile:
    """A profile of this machine's first core.

    Args:
        configurations: Methods to measure.
        device: What to call the machine.
        report: Told what is measured next.
    """
    with one_thread():
        numel = max(shapes.get("resnet50").numel, shapes.numel(LARGE))
        noise = torch.randn(numel + (1 << 16), generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        methods = {}
        for configuration in configurations:
            report(str(configuration))
            methods[key_of(configuration)] = costs(configuration, noise, (shapes.get("resnet50").parameters, LARGE))
        about = f"one thread, torch {torch.__version__}, {date.today()}"
        return Profile(device, "measured", about, _copy(noise), methods)


@contextmanager
def one_thread() -> Iterator[None]:
    """Has torch compute with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _copy(noise: Tensor) -> float:
    """Seconds a value in which a gradient is copied to another place."""
    there = torch.empty_like(noise)
    times = []
    for _ in range(5):
        start = time.thread_time()
        there.copy_(noise)
        times.append(time.thread_time() - start)
    return min(times) / len(noise)
