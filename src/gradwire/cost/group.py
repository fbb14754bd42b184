"""The setting that a group of workers is in, measured by all of them together."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.cost import measure, probe, user
from gradwire.cost.advice import Candidate
from gradwire.cost.scene import Scene
from gradwire.cost.simulation import Setting
from gradwire.engine.nodes import Inside
from gradwire.errors import ConfigurationError
from gradwire.units import rounded
from gradwire.wire import ProcessGroupTransport, Transport
from gradwire.wire.sibling import sibling_of

CPU = torch.device("cpu")

APART = 2.0
"""It is said if the slowest worker takes so many times as long to encode as the quickest."""


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


def look(scene: Scene, step_time_given: bool, tried: Sequence[Candidate]) -> tuple[Setting, int, str] | None:
    """Joins the group of the environment, as torchrun gives it, and measures; rank 0 alone is told.

    Args:
        scene: What is not measured.
        step_time_given: Whether a step's time is given and need not be measured.
        tried: Methods whose encoding and decoding are measured.

    Returns:
        The setting, the model's number of parameters, and a title.

    Raises:
        ConfigurationError: If the model is not as it must be.
    """
    rank, _, device = join()
    try:
        group = dist.group.WORLD
        if group is None:
            raise ConfigurationError("there is no process group; start with torchrun")
        seen = measured(scene, step_time_given, tried, group, device)
    finally:
        dist.destroy_process_group()
    return seen if rank == 0 else None


def measured(
    scene: Scene, step_time_given: bool, tried: Sequence[Candidate], group: dist.ProcessGroup, device: torch.device
) -> tuple[Setting, int, str]:
    """What :func:`look` returns, of a group that all ranks are in and nothing else uses."""
    module, step = user.make_with_step(scene.shapes) if user.is_own(scene.shapes) else (None, None)
    model = scene.model() if module is None else user.model(scene.shapes, module)
    transport = ProcessGroupTransport(group)
    network = probe.measured(transport, device, probe.SIZES)
    exact = Candidate.make("dense", {}).configuration
    profile = measure.here([exact, *(each.configuration for each in tried)], model.parameters, device)
    profile, apart = measure.slowest(profile, transport, device)
    assumed = replace(scene, workers=transport.world_size, gpus=1, near=Scene.near).setting(model)
    setting = replace(assumed, network=network, profile=profile, cores=cores(transport, device))
    if 1 < started() < transport.world_size:
        nodes = Inside(None).of(dist.get_process_group_ranks(group))
        circles = [sibling_of(group, device, each(transport.rank)) for each in (nodes.mates, nodes.peers)]
        near, between = (probe.measured(ProcessGroupTransport(each), device, probe.SIZES) for each in circles)
        setting = replace(setting, levels=(near, between))
    told = "" if step_time_given else " (assumed)"
    if module is not None and step is not None and not step_time_given:
        left = user.leaves_out(scene.shapes, module.to(device), step)
        anywhere = bool(probe.largest([left], transport, device)[0])
        wrapped = DistributedDataParallel(module, find_unused_parameters=anywhere)
        setting = replace(setting, workload=probe.arrivals(wrapped, step, transport, clock=measure.clock_of(device)))
        told = " (measured)"
    slow = f"; its slowest worker takes {apart:.1f} times as long to encode as its quickest" if apart > APART else ""
    title = (
        f"{scene.shapes}, {rounded(model.numel / 1e6, 3)} M parameters, {network.workers} workers as they are, "
        f"a step takes {1e3 * setting.workload.seconds:.4g} ms{told}{slow}"
    )
    return setting, model.numel, title


def cores(transport: Transport, device: torch.device) -> float:
    """Cores that each worker of this machine has; a GPU is one of its own."""
    if device.type != "cpu":
        return 1.0
    name = hashlib.blake2b(platform.node().encode(), digest_size=8).digest()
    names = transport.all_gather(torch.frombuffer(bytearray(name), dtype=torch.uint8))()
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return here / int((names == names[transport.rank]).all(1).sum())
