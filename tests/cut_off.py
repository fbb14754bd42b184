"""A worker that is killed while much is on its way to it and from it, and what becomes of the other one.

``python tests/cut_off.py FOLDER`` forks both and writes how the second one ended to ``ending.json``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from gradwire.errors import WireError
from gradwire.wire import ProcessGroupTransport

TIMEOUT = 600
NBYTES = 1 << 28

HANG_SECONDS = 90
"""A small part of the timeout, and enough on a busy machine."""


def work(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    assert isinstance(group, dist.ProcessGroup)
    transport = ProcessGroupTransport(group)
    payload = torch.ones(NBYTES, dtype=torch.uint8)
    if rank == 0:
        received = torch.zeros_like(payload)
        pending = [group.recv([received], 1, 0), group.send([payload], 1, 0)]
        first, last = received[:1].numpy(), received[-1:].numpy()
        while not first[0]:
            pass
        assert pending
        (folder / "in-the-midst.json").write_text(json.dumps(not last[0]))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        transport.exchange(payload, 0)()
    except WireError as error:
        ending = {"text": str(error)}
        transport.abort()
        transport.close()
        (folder / "ending.json").write_text(json.dumps(ending))


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    workers = []
    for rank in range(2):
        if not (process := os.fork()):
            return work(rank, folder)
        workers.append(process)
    deadline = time.monotonic() + HANG_SECONDS
    while workers and time.monotonic() < deadline:
        workers = [each for each in workers if not os.waitpid(each, os.WNOHANG)[0]]
        time.sleep(0.05)
    for process in workers:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
