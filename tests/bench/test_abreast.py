"""Work that is done side by side goes on where a process dies."""

import multiprocessing
import os
import signal
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from gradwire_bench.abreast import abreast

pytestmark = pytest.mark.usefixtures("begun_quickly")


def _square(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 5:
        raise ValueError("five")
    return number * number


def test_an_item_that_ends_its_process_or_fails_ends_no_other() -> None:
    with abreast(_square, 2) as run:
        found = dict(run(range(8)))
        again = dict(run([1]))
    assert {number: future.result() for number, future in found.items() if number not in (3, 5)} == {
        number: number * number for number in range(8) if number not in (3, 5)
    }
    assert isinstance(found[3].exception(), BrokenProcessPool)
    assert isinstance(found[5].exception(), ValueError)
    assert again[1].result() == 1


def _sleep(folder: str) -> None:
    Path(folder, str(os.getpid())).touch()
    time.sleep(600)


def _work_for_ever(folder: str, python: str) -> None:
    multiprocessing.set_executable(python)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
    with abreast(_sleep, 2) as run:
        list(run([folder, folder]))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_processes_end_where_their_parent_is_killed_or_interrupted(tmp_path: Path, how: signal.Signals) -> None:
    parent = multiprocessing.get_context("spawn").Process(target=_work_for_ever, args=(str(tmp_path), sys.executable))
    parent.start()
    deadline = time.monotonic() + 120
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    working = [int(each.name) for each in tmp_path.iterdir()]
    assert parent.pid is not None
    os.kill(parent.pid, how)
    parent.join(max(deadline - time.monotonic(), 0))
    while any(map(_alive, working)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert parent.exitcode
    assert len(working) == 2
    assert not any(map(_alive, working))


def _alive(pid: int) -> bool:
    """Whether a process is there; one that ended and nobody waits for is not."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"
