"""Steps of training on a GPU: how much longer than DDP's, what they wait for, what runs beside backward."""

from __future__ import annotations

import tempfile
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire_bench import models, placement
from gradwire_bench.gpu_timing import seconds_in_a_row

Subject = tuple[str, Callable[[], dict[str, Any]]]
"""What is measured, and what measures it: figures by name, among them whether a target was ``reached``."""

MOST_TOLD = 1500
"""Characters of an error that are kept, its last."""

METHODS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("efsignsgd", {}),
    ("qsgd", {"bits": 4}),
    ("topk", {"ratio": 0.01}),
    ("acpsgd", {"rank": 4}),
    ("bf16", {}),
    ("terngrad", {}),
    ("natural", {}),
    ("randomk", {"ratio": 0.01}),
    ("powersgd", {"rank": 4}),
    ("subspace", {}),
    ("deadzone", {}),
)


@dataclass(frozen=True)
class Task:
    """A model in training.

    Attributes:
        make: Makes it.
        batch_of: Makes its batches.
        samples: Of a step.
        most_added: What a method may add to DDP's step at world size 1.
        warm_up, calls: Steps that do not count, and of a round that does.
    """

    make: Callable[[], nn.Module]
    batch_of: Callable[[int, torch.device], tuple[Tensor, Tensor]]
    samples: int
    most_added: float
    warm_up: int = 5
    calls: int = 8


class Small(nn.Module):
    """Two layers."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, values: Tensor, wanted: Tensor) -> Tensor:
        """The squared error."""
        error: Tensor = self.layers(values) - wanted
        return error.square().mean()


def small_batch(count: int, device: torch.device, width: int = 512) -> tuple[Tensor, Tensor]:
    """Random values and what is wanted of them."""
    return torch.randn(count, width, device=device), torch.randn(count, width, device=device)


TASKS = {
    "ResNet-50": Task(models.ResNet50, models.resnet50_batch, 128, 0.01),
    "GPT-2 124M": Task(models.GPT2, models.gpt2_batch, 8, 0.03),
}
SMALL = Task(partial(Small, 64), partial(small_batch, width=64), 4, 0.01, warm_up=2, calls=1)
"""In place of any of them where nothing is to be learnt but that it runs."""


@contextmanager
def world_of_one(device: torch.device) -> Iterator[None]:
    """A process group of this process alone, over NCCL where there is a GPU."""
    with tempfile.TemporaryDirectory() as folder:
        backend = placement.BACKENDS["nccl" if device.type == "cuda" else "gloo"]
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


@contextmanager
def training(
    task: Task, device: torch.device, method: str | None, options: dict[str, Any]
) -> Iterator[Callable[[], None]]:
    """A step of forward, backward and optimizer in bfloat16, through DDP with a method or without."""
    torch.manual_seed(0)
    with torch.device(device):  # which fills weights in no time
        net, batch = task.make(), task.batch_of(task.samples, device)
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    with nullcontext() if method is None else closing(gradwire.compress(model, method, **options)):
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)

        def run() -> None:
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(*batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        for _ in range(task.warm_up):
            run()
        yield run


def overheads(task: Task, device: torch.device) -> Iterator[Subject]:
    """Of each method, over DDP by itself right before and after it."""
    dense: list[float] = []

    def taken(method: str | None, options: dict[str, Any]) -> float:
        with training(task, device, method, options) as run:
            return seconds_in_a_row(run, device, task.calls)

    def measured(method: str, options: dict[str, Any]) -> dict[str, Any]:
        dense[:] = dense[-1:] or [taken(None, {})]
        took = taken(method, options)
        dense.append(taken(None, {}))
        alone = sum(dense) / len(dense)
        more = took / alone - 1
        return {
            "milliseconds": 1e3 * took,
            "dense_milliseconds": 1e3 * alone,
            "overhead": more,
            "target": task.most_added,
            "reached": None if device.type == "cpu" else more <= task.most_added,
        }

    with world_of_one(device):
        for method, options in METHODS:
            yield method, partial(measured, method, options)


def waits(task: Task, device: torch.device) -> Iterator[Subject]:
    """A step of DDP and of each method in which waiting for the device is an error, after some that may wait."""

    def measured(method: str | None, options: dict[str, Any]) -> dict[str, Any]:
        with training(task, device, method, options) as run:
            try:
                _let_the_host_wait(device, False)
                run()
            except Exception as error:
                told = "".join(traceback.format_exception(error)).replace(f"{Path(gradwire.__file__).parents[1]}/", "")
                if "synchroniz" not in told:
                    raise
                return {"reached": False, "found": told[-MOST_TOLD:]}
            finally:
                _let_the_host_wait(device, True)
        return {"reached": True}

    with world_of_one(device):
        for method, options in ((None, {}), *METHODS):
            yield method or "DDP alone", partial(measured, method, options)


def _let_the_host_wait(device: torch.device, may: bool) -> None:
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("default" if may else "error")


Span = tuple[float, float]
"""Beginning and end, in milliseconds."""


def overlaps(task: Task, device: torch.device) -> Iterator[Subject]:
    """When each stream of the device was busy in a step, and how much of what is ours ran beside backward."""

    def measured(method: str, options: dict[str, Any]) -> dict[str, Any]:
        with training(task, device, method, options) as run:
            streams = _streams(run, device)
        busiest = max(streams, key=lambda stream: length(streams[stream]), default="")
        rest = merged([span for stream, spans in streams.items() if stream != busiest for span in spans])
        ours, beside = length(rest), length(common(rest, streams.get(busiest, [])))
        return {"streams": streams, "ours": ours, "beside": beside / ours if ours else None, "reached": None}

    with world_of_one(device):
        for method, options in METHODS[:4]:
            yield method, partial(measured, method, options)


def _streams(run: Callable[[], None], device: torch.device) -> dict[str, list[Span]]:
    """Of each of the device's streams, or of the host's threads where that is the device, when it was at work."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiled:
        run()
        placement.wait(device)
    found: dict[str, list[Span]] = defaultdict(list)
    results = profiled.profiler.kineto_results if profiled.profiler else None
    for event in results.events() if results else []:
        if (event.device_type() == DeviceType.CUDA) == on_gpu:
            begin = 1e-6 * event.start_ns()
            found[str(event.device_resource_id())].append((begin, begin + 1e-6 * event.duration_ns()))
    first = min((begin for spans in found.values() for begin, _ in spans), default=0.0)
    return {
        stream: [(round(begin - first, 3), round(end - first, 3)) for begin, end in merged(spans)]
        for stream, spans in found.items()
    }


def merged(spans: list[Span], gap: float = 0.005) -> list[Span]:
    """Spans in order, those that touch made one."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1] + gap:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def length(spans: list[Span]) -> float:
    """Milliseconds in all."""
    return sum(end - begin for begin, end in spans)


def common(first: list[Span], second: list[Span]) -> list[Span]:
    """Where both are."""
    both = [(max(a, c), min(b, d)) for a, b in first for c, d in second]
    return [(begin, end) for begin, end in both if begin < end]
