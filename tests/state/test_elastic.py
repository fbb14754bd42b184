"""The elastic example under torchrun: one of two machines dies, and the other goes on where both were."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic.py"
SECONDS = 240


def machine(folder: Path, port: int, number: int) -> subprocess.Popen[bytes]:
    """A torchrun of one worker, as each machine would start it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "elastic"]
    command += ["--rdzv-conf", f"last_call_timeout=5,is_host={number == 0}", "--max-restarts", "5"]
    command += [str(EXAMPLE), "--folder", str(folder / "checkpoints"), "--steps", "60", "--pause", "0.1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / f"machine-{number}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def children(pid: int) -> list[int]:
    return [int(each) for task in Path(f"/proc/{pid}/task").glob("*/children") for each in task.read_text().split()]


def die(process: subprocess.Popen[bytes]) -> None:
    """At once, with its workers."""
    pids = [process.pid, *children(process.pid)] if process.poll() is None else []
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    process.wait()


def test_training_goes_on_when_a_machine_dies(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    machines = [machine(tmp_path, port, number) for number in range(2)]
    try:
        deadline = time.monotonic() + SECONDS
        parts = [tmp_path / "checkpoints" / f"step-10-rank-{rank}-of-2.pt" for rank in range(2)]
        while not all(part.exists() for part in parts) and time.monotonic() < deadline:
            time.sleep(0.05)
        die(machines[1])
        assert machines[0].wait(SECONDS) == 0
    finally:
        for each in machines:
            die(each)
        logs = [(tmp_path / f"machine-{number}.log").read_text() for number in range(2)]
        print(*logs, sep="\n")
    resumed = re.search(r"^1 workers go on from step (\d+) of 2 workers$", logs[0], re.MULTILINE)
    assert resumed is not None
    assert int(resumed[1]) >= 10
    losses = {(int(step), int(count)): float(loss) for log in logs for step, count, loss in found(log)}
    assert losses[59, 1] < losses[int(resumed[1]), 1]
    assert {count for _, count in losses} == {1, 2}


def found(log: str) -> list[tuple[str, str, str]]:
    return re.findall(r"^step (\d+) workers (\d+) loss ([0-9.]+)$", log, re.MULTILINE)
