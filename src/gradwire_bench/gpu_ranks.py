"""Two ranks on one GPU: whether they end with the same bits, by whatever carries their bytes.

``python -m gradwire_bench.gpu_ranks BACKEND DEVICE`` is one of them, told who it is by the environment.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.errors import GradwireError, LabError
from gradwire.lab import Lab
from gradwire_bench import placement
from gradwire_bench.gpu_steps import METHODS, SMALL, Subject
from gradwire_bench.launch import ended_early
from gradwire_bench.worker import fingerprint, process_group, reason

RANKS = 2
STEPS = 4
BITS = "bits "
TIMEOUT = {"cuda": 40.0, "cpu": 300.0}
"""Seconds that ranks may take: NCCL may refuse two on a GPU, or stall; gloo does neither."""

WAYS: dict[str, tuple[str, dict[str, str]]] = {
    "NCCL, a host name a rank": ("nccl", {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}),
    "NCCL, several ranks a GPU": ("nccl", {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2"}),
    "gloo": ("gloo", {}),
}
"""What carries bytes, and its environment. NCCL takes two ranks on a GPU for two hosts if they say so."""


def ranks(device: torch.device) -> Iterator[Subject]:
    """Each way to have two ranks; on the CPU gloo alone."""
    for way, (backend, environment) in WAYS.items():
        if device.type == "cuda" or backend == "gloo":
            yield way, partial(_together, backend, environment, device)


def _together(backend: str, environment: dict[str, str], device: torch.device) -> dict[str, Any]:
    """Starts the ranks and compares what they say."""
    command = [sys.executable, "-m", "gradwire_bench.gpu_ranks", backend, device.type]
    try:
        with Lab(RANKS, None) as lab:
            outputs = lab.run(command, env=environment, timeout=TIMEOUT[device.type]).outputs
    except LabError as error:
        return {"reached": False, "found": ended_early(error)}
    first, second = (json.loads(said.splitlines()[-1]) for said in outputs)
    broken = [f"{name}: {told}" for name, told in first.items() if not told.startswith(BITS)]
    differing = [f"{name}: other bits" for name in first if first[name] != second[name]]
    return {"reached": not broken and not differing, "found": "; ".join(broken + differing)}


def main(backend: str, kind: str) -> None:
    """One rank: what the parameters are after some steps with each method, or why there were none."""
    device = torch.device(kind, 0) if kind == "cuda" else torch.device("cpu")
    carried = placement.BACKENDS["nccl"] if backend == "nccl" else f"cpu:gloo,{kind}:gloo" if kind == "cuda" else "gloo"
    if "NCCL_NET" in os.environ:
        os.environ["NCCL_HOSTID"] = f"host{os.environ['RANK']}"
    found = {}
    with process_group(TIMEOUT[kind] / 2, carried) as (rank, _):
        for method, options in METHODS[:4]:
            torch.manual_seed(0)
            net = SMALL.make().to(device)
            torch.manual_seed(1 + rank)
            batch = SMALL.batch_of(SMALL.samples, device)
            try:
                model = DistributedDataParallel(net)
                with closing(gradwire.compress(model, method, **options)):
                    optimizer = torch.optim.SGD(net.parameters(), 0.1)
                    for _ in range(STEPS):
                        model(*batch).backward()
                        optimizer.step()
                        optimizer.zero_grad()
                found[method] = BITS + fingerprint(net)
            except GradwireError as error:
                found[method] = reason(error)
        dist.barrier()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
