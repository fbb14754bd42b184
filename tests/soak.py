"""Trains for long with random options: ``python tests/soak.py --steps 10000``.

Every attachment is drawn from the catalogue, with guards and values that are not finite now and then. After each, all
ranks must have the same bits, and none may have grown since its 100th step by more than plain DDP may.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from catalogue import Case, cases
from pool import Pool

WORKERS = 4
SETTLED = 100
"""Steps after which nothing may grow any more."""

ROOM = 4 << 20
"""Bytes by which a process may still grow: plain DDP on gloo does so by 2 MB in 1,400 steps, no objects of Python."""


def resident_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def train(case: Case, guards: dict[str, Any], steps: int, seed: int) -> tuple[bytes, int]:
    """The parameters' bits, and the bytes grown by since step 100."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(48, 96), nn.ReLU(), nn.Linear(96, 80), nn.ReLU(), nn.Linear(80, 10))
    model = DistributedDataParallel(net, bucket_cap_mb=0.02)
    handle = gradwire.compress(model, case.method, **case.arguments, **guards)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(1000 * dist.get_rank() + seed)
    settled = 0
    for step in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(
            model(torch.randn(16, 48, generator=data)), torch.randint(10, (16,), generator=data)
        )
        if step % 97 == 96 and dist.get_rank() == step % WORKERS:
            loss = loss * torch.inf
        loss.backward()
        if all(bool(each.grad.isfinite().all()) for each in model.parameters() if each.grad is not None):
            optimizer.step()
        if step == SETTLED:
            settled = resident_bytes()
    grown = resident_bytes() - settled
    handle.close()
    return torch.cat([each.detach().view(-1) for each in model.parameters()]).numpy().tobytes(), grown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--each", type=int, default=500, help="steps of an attachment")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.each <= SETTLED:
        parser.error(f"--each {options.each} is too few: memory settles in {SETTLED} steps, so choose more")
    draw = random.Random(options.seed)
    chosen = cases()
    pool, failed, done = Pool(), 0, 0
    while done < options.steps:
        case, seed = draw.choice(chosen), draw.randrange(1 << 20)
        guards = {
            "rollback": draw.random() < 0.5,
            "verify_every": draw.choice([0, 0, 0, 1, 10, 100]),
            "audit_every": draw.choice([0, 0, 50]),
        }
        (bits, _), *others = results = pool.run(WORKERS, train, case, guards, options.each, seed)
        done += options.each
        same, grown = all(other == bits for other, _ in others), max(each for _, each in results)
        failed += not same or grown > ROOM
        print(
            f"{done:,} steps: {case} {guards}: {'same bits' if same else 'OTHER BITS'}, grown by {grown:,} bytes",
            flush=True,
        )
    pool.close()
    print(f"{failed} of {-(-options.steps // options.each)} attachments failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
