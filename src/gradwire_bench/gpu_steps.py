"""What a step of training waits for on a GPU, and how much longer it takes than DDP's."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire_bench import models
from gradwire_bench.gpu_report import Step, Verdict
from gradwire_bench.gpu_timing import Told, seconds

DENSITY = 0.01
RANK = 4
METHODS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("bf16", {}),
    ("efsignsgd", {}),
    ("qsgd", {"bits": 4}),
    ("terngrad", {}),
    ("natural", {}),
    ("randomk", {"ratio": DENSITY}),
    ("topk", {"ratio": DENSITY}),
    ("powersgd", {"rank": RANK}),
)
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, torch.device], tuple[Tensor, Tensor]], int]] = {
    "ResNet-50": (models.ResNet50, models.resnet50_batch, 128),
    "GPT-2 124M": (models.GPT2, models.gpt2_batch, 8),
}
"""A model, its batches, and how many samples a step takes."""

MOST_ADDED = {"ResNet-50": 0.01, "GPT-2 124M": 0.03}
"""What a method may add to DDP's step at world size 1."""


@contextmanager
def world_of_one() -> Iterator[None]:
    """A process group of this process alone, over NCCL."""
    with tempfile.TemporaryDirectory() as folder:
        where = f"file://{folder}/store"
        dist.init_process_group("cuda:nccl,cpu:gloo", init_method=where, rank=0, world_size=1)
        try:
            yield
        finally:
            torch.cuda.synchronize()
            dist.destroy_process_group()


def waits(method: str, options: dict[str, Any], device: torch.device, told: Told) -> Verdict:
    """A step of a small model after two that may wait, for what is made once."""
    told(f"waits of {method}")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)).to(device)
    inputs = torch.randn(64, 512, device=device)
    try:
        model = DistributedDataParallel(net)
        with closing(gradwire.compress(model, method, **options)):
            for step in range(4):
                torch.cuda.set_sync_debug_mode("error" if step == 3 else "default")
                model(inputs).square().mean().backward()
            torch.cuda.set_sync_debug_mode("default")
    except Exception as error:  # whatever it is, the other methods are still worth knowing
        return Verdict(f"no waits in a step of {method}", False, f"{type(error).__name__}: {str(error)[:200]}")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return Verdict(f"no waits in a step of {method}", True, "")


def steps(name: str, device: torch.device, told: Told) -> Iterator[Step]:
    """DDP by itself before and after each method, whose step is held against the mean of the two."""
    before = _step(name, None, {}, device, told)
    yield Step(name, "DDP", 1e3 * before, 0.0, MOST_ADDED[name])
    for method, options in METHODS:
        try:
            took = _step(name, method, options, device, told)
        except Exception as error:  # the other methods are still worth knowing
            told(f"{name}, {method}: {type(error).__name__}: {error}")
            continue
        after = _step(name, None, {}, device, told)
        yield Step(name, method, 1e3 * took, 2 * took / (before + after) - 1, MOST_ADDED[name])
        before = after


def _step(name: str, method: str | None, options: dict[str, Any], device: torch.device, told: Told) -> float:
    """Median seconds of forward, backward and optimizer in bfloat16."""
    told(f"{name}, {method or 'DDP'}")
    torch.manual_seed(0)
    make, batch_of, count = MODELS[name]
    with torch.device(device):  # which fills weights in no time
        net, batch = make(), batch_of(count, device)
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    with nullcontext() if method is None else closing(gradwire.compress(model, method, **options)):
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)

        def run() -> None:
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(*batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        return seconds(run, device, 12)
