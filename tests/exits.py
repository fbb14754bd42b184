"""Workers whose program ends while a collective of theirs hangs, because another worker was stopped.

``python tests/exits.py FOLDER``: one process imports everything; a world of two workers is forked from it for each way
of ending. Forked workers leave through the end of this script, so their interpreters end as any other does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.attach.rehearsal import rehearse
from gradwire.engine.configuration import Configuration

ENDINGS = {"returns": 0, "raises": 1, "exits": 3}
"""Ways for the first worker to end, and its exit code."""

HANG_SECONDS = 90
"""A small part of the process group's timeout, and enough on a busy machine."""

kept: list[gradwire.Handle] = []
"""What is still attached when the interpreter ends."""


class CutShortError(Exception):
    """Comes in the middle of a backward pass."""


def train(rank: int, path: Path) -> None:
    """The second worker stops before its third backward pass; the first one's is cut short once a bucket is sent."""
    dist.init_process_group("gloo", init_method=f"file://{path}-rendezvous", rank=rank, world_size=2)
    net = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 40))
    model = DistributedDataParallel(net, bucket_cap_mb=0.006)
    kept.append(gradwire.compress(model, "topk", ratio=0.1, fuse_bytes=1))
    for step in range(3):
        if step == 2:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            net[0].weight.register_hook(cut_short)
        model(torch.ones(4, 32)).sum().backward()


def cut_short(gradient: Tensor) -> None:
    time.sleep(0.5)  # until the wire waits for the first bucket
    raise CutShortError("on purpose")


def work(ending: str, rank: int, path: Path) -> None:
    os.dup2(os.open(f"{path}-{rank}.txt", os.O_CREAT | os.O_WRONLY), sys.stderr.fileno())
    try:
        train(rank, path)
    except CutShortError:
        if ending == "raises":
            raise
        if ending == "exits":
            sys.exit(ENDINGS[ending])


def codes_of(first: dict[int, str]) -> dict[str, int | None]:
    """Exit codes of the first workers, whose process numbers and endings are given; None for those that hang."""
    codes: dict[str, int | None] = dict.fromkeys(first.values())
    deadline = time.monotonic() + HANG_SECONDS
    while first and time.monotonic() < deadline:
        for process in list(first):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                codes[first.pop(process)] = os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    return codes


def main(folder: Path) -> None:
    import torch._dynamo  # DDP does so when it is first used, in seconds

    torch.set_num_threads(1)
    rehearse(Configuration.make("topk", {"ratio": 0.1}))
    first: dict[int, str] = {}
    second = []
    for ending in ENDINGS:
        for rank in range(2):
            if not (process := os.fork()):
                return work(ending, rank, folder / ending)
            if rank:
                second.append(process)
            else:
                first[process] = ending
    codes = codes_of(first)
    for process in [*first, *second]:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    (folder / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
