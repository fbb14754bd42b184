"""Ranks end with the same bits though their machines add and multiply in another order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gradwire import methods

OLDER = {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default"}
"""Makes a processor add as one without wide vectors does."""

STARTED = """
import sys
from contextlib import closing

import torch
import torch.distributed as dist
import gradwire
from catalogue import OPTIONS

rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
shapes = ((96, 120), (64, 3, 3, 3), (50,), (33, 77))
averages = {}
for name in gradwire.methods.names():
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    options = OPTIONS.get(name, [{}])[0]
    named = [(str(place), parameter) for place, parameter in enumerate(parameters)]
    with closing(gradwire.Synchronizer(named, name, **options)) as synchronizer:
        for step in range(4):
            for place, parameter in enumerate(parameters):
                whole = torch.arange(parameter.numel(), dtype=torch.int64) * 2654435761 + 97 * step + 13 * place + rank
                parameter.grad = ((whole * whole // 7 % 65537 - 32768).float() / 32768).view(parameter.shape)
            synchronizer.synchronize()
            averages[f"{name} {step}"] = torch.cat([parameter.grad.flatten() for parameter in parameters])
torch.save(averages, f"{folder}/{rank}.pt")
products = torch.linalg.qr(torch.linspace(-1, 1, 4096).view(64, 64).cos()).R
torch.save(products, f"{folder}/products{rank}.pt")
dist.destroy_process_group()
"""


def test_every_rank_has_the_same_bits(tmp_path: Path) -> None:
    here = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(sys.path)}
    environments = [here, here | OLDER]
    workers = [
        subprocess.Popen([sys.executable, "-c", STARTED, str(rank), str(tmp_path)], env=environment)
        for rank, environment in enumerate(environments)
    ]
    try:
        assert [worker.wait(300) for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
    products = [torch.load(tmp_path / f"products{rank}.pt", weights_only=True) for rank in range(2)]
    first, second = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    assert {name.split()[0] for name in first} == set(methods.names())
    assert [name for name, average in first.items() if not torch.equal(average, second[name])] == []
    if torch.equal(*products):
        pytest.skip("this build of torch multiplies alike in both surroundings: nothing was put to the test")
