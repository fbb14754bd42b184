"""The setting that a group of workers is in, measured by all of them together."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.attach.sibling import sibling_of
from gradwire.cost import probe, user
from gradwire.cost.scene import Scene
from gradwire.cost.shapes import Model
from gradwire.cost.simulation import Setting
from gradwire.cost.workload import Workload
from gradwire.engine.nodes import Inside
from gradwire.errors import ConfigurationError
from gradwire.layout import flat_slots

CPU = torch.device("cpu")


def join() -> tuple[int, int, torch.device]:
    """Joins the group of the environment, as torchrun gives it: this rank, how many there are, and its device."""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else CPU
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return dist.get_rank(), dist.get_world_size(), device


def started() -> int:
    """Workers that torchrun started on this node; 1 if it started none."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def look(scene: Scene, step_time_given: bool) -> tuple[Setting, int, str] | None:
    """Joins the group of the environment, as torchrun gives it, and measures; rank 0 alone is told.

    Args:
        scene: What is not measured.
        step_time_given: Whether a step's time is given and need not be measured.

    Returns:
        The setting, the model's number of parameters, and a title.

    Raises:
        ConfigurationError: If the model is not as it must be.
    """
    rank, workers, device = join()
    cuda = device.type == "cuda"
    try:
        module, step = user.make_with_step(scene.shapes) if user.is_own(scene.shapes) else (None, None)
        model = scene.model() if module is None else user.model(scene.shapes, module)
        group = dist.group.WORLD
        if group is None:
            raise ConfigurationError("there is no process group; start with torchrun")
        network = probe.measured(group, device)
        setting = replace(replace(scene, workers=workers, gpus=1).setting(model), network=network, cores=_cores(cuda))
        if 1 < started() < workers:
            nodes = Inside(None).of(range(workers))
            near, between = (sibling_of(group, device, ranks) for ranks in (nodes.mates(rank), nodes.peers(rank)))
            setting = replace(setting, levels=(probe.measured(near, device), probe.measured(between, device)))
        told = "" if step_time_given else " (assumed)"
        if module is not None and step is not None and not step_time_given:
            wrapped = DistributedDataParallel(module.to(device))
            before, *buckets = probe.arrivals(wrapped, step)
            setting = replace(setting, workload=_arriving(model, setting.workload, before, buckets))
            told = " (measured)"
        seconds = setting.workload.seconds
    finally:
        dist.destroy_process_group()
    title = (
        f"{scene.shapes}, {model.numel / 1e6:.1f} M parameters, {workers} workers as they are, "
        f"a step takes {1e3 * seconds:.4g} ms{told}"
    )
    return (setting, model.numel, title) if rank == 0 else None


def _cores(cuda: bool) -> float:
    """Cores that each worker of this machine has; a GPU is one of its own."""
    if cuda:
        return 1.0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores / started()


def _arriving(model: Model, assumed: Workload, before: float, buckets: list[float]) -> Workload:
    """A workload whose backward pass takes what was measured; as many buckets as DDP made."""
    if len(buckets) == len(assumed.buckets):
        return Workload(assumed.buckets, tuple(buckets), before)
    whole = flat_slots(list(reversed(model.parameters)))
    return (
        Workload((whole,), (sum(buckets),), before)
        if len(buckets) == 1
        else replace(
            assumed,
            backward=tuple(sum(buckets) * part / sum(assumed.backward) for part in assumed.backward),
            forward=before,
        )
    )
