"""Copies do what a Python that was begun by itself does, as far as a test sees of it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

Quick = Callable[..., str]

PROGRAM = "import os, sys; print(sys.argv, __name__, os.getcwd(), os.environ['OF_A_TEST'], 'torch' in sys.modules)"


def test_it_takes_arguments_environment_and_folder(quick_python: Quick, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    path = str(tmp_path / "program.py")
    for what, name in ((["-c", PROGRAM], "-c"), (["-m", "program"], path), (["program.py"], "program.py")):
        command, told = [quick_python(), *what, "given"], {"OF_A_TEST": "yes", "PYTHONPATH": str(tmp_path)}
        done = subprocess.run(command, cwd=tmp_path, env=told, capture_output=True, text=True, check=True)
        assert done.stdout == f"{[name, 'given']} __main__ {tmp_path} yes True\n"
        assert done.stderr == ""


def test_it_ends_as_its_program_does(quick_python: Quick) -> None:
    for program, code, said in (
        ("pass", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('so')", 1, "so\n"),
        ("raise ValueError('so')", 1, "ValueError: so\n"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
    ):
        done = subprocess.run([quick_python(), "-c", program], capture_output=True, text=True)
        assert done.returncode == code
        assert done.stderr.endswith(said)
        assert bool(done.stderr) == bool(said)


WAITS = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_is_ended_with_who_asked_for_it(quick_python: Quick, number: signal.Signals) -> None:
    asking = subprocess.Popen([quick_python(), "-c", WAITS], stdout=subprocess.PIPE, text=True)
    assert asking.stdout is not None
    copy = Path("/proc", asking.stdout.readline().strip())
    assert copy.exists()
    asking.send_signal(number)
    assert asking.wait() == -number
    deadline = time.monotonic() + 60
    while copy.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not copy.exists()


def test_it_has_open_files(quick_python: Quick) -> None:
    read, write = os.pipe()
    subprocess.run([quick_python(), "-c", f"import os; os.write({write}, b'here')"], pass_fds=[write], check=True)
    os.close(write)
    assert os.read(read, 10) == b"here"
    assert os.read(read, 10) == b""
    os.close(read)


@pytest.mark.usefixtures("begun_quickly")
def test_processes_are_spawned_as_copies() -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        assert process.submit(os.getpid).result() != os.getpid()
        assert process.submit(os.getenv, "PYTEST_CURRENT_TEST").result() == os.environ["PYTEST_CURRENT_TEST"]
        assert "copies.py" in process.submit(Path.read_text, Path("/proc/self/cmdline")).result()
